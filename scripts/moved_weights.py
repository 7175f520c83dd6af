"""What rounding leaves of an update: `python -m scripts.moved_weights ABLATION RECORD`.

ABLATION is a folder of `mismatch-probe ablate` whose cells kept their checkpoints. RECORD, a JSON file, gets a row for
each cell, each later checkpoint and each format.

Checkpoints hold FP32 master weights; policy and engine compute with what BF16 or FP16 makes of them. A change of less
than half the distance to the next number of the format moves nothing where the weight was such a number before, as
every weight of a checkpoint in BF16 is.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from mismatch_probe.dtypes import Dtype, side_label
from mismatch_probe.training_path.arithmetic import torch_dtype

_DTYPES = (Dtype.BF16, Dtype.FP16)


@dataclass
class Moved:
    """Sums over weights: how many there are, how many moved once rounded, <rounded change, change>, |change|^2."""

    weights: int = 0
    moved: int = 0
    along: float = 0.0
    squared: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, dtype: Dtype) -> None:
        """before, after: one tensor of the checkpoint, FP32."""
        change = after - before
        rounded = after.to(torch_dtype(dtype)).float() - before.to(torch_dtype(dtype)).float()
        self.weights += change.numel()
        self.moved += int(torch.count_nonzero(rounded))
        self.along += float((rounded * change).sum(dtype=torch.float64))
        self.squared += float(change.square().sum(dtype=torch.float64))

    @property
    def passed_on(self) -> float:
        """The part of the change, along its own direction, that the rounded weights have: 1 is all of it."""
        return self.along / self.squared if self.squared else 0.0


def compare_checkpoints(before: Path, after: Path) -> dict[Dtype, Moved]:
    """Of each dtype what rounding to it leaves of the change from one folder's weights to the other's."""
    moved = {dtype: Moved() for dtype in _DTYPES}
    for old, new in zip(_tensors(before), _tensors(after), strict=True):
        for dtype, sums in moved.items():
            sums.add(old, new, dtype)
    return moved


def _tensors(folder: Path) -> Iterator[torch.Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield file.get_tensor(name).float()


def rows_of(ablation: Path) -> Iterator[dict[str, str | int | float]]:
    """Of every cell the change from its weights before training to each later checkpoint, rounded to each format.

    A cell that kept no checkpoint of step 0 gives no row: the change since another step is not that of its training.
    """
    for cell in sorted((ablation / "cells").iterdir()):
        first, *later = sorted((cell / "checkpoints").glob("step-*")) or [cell]
        if first.name != "step-000000":
            print(f"{cell} kept no checkpoint of step 0 and is left out")
            continue
        for checkpoint in later:
            for dtype, sums in compare_checkpoints(first / "model", checkpoint / "model").items():
                yield {
                    "cell": cell.name,
                    "steps": int(checkpoint.name.removeprefix("step-")),
                    "rounded_to": side_label(dtype),
                    "weights": sums.weights,
                    "moved": sums.moved,
                    "passed_on": sums.passed_on,
                }


if __name__ == "__main__":
    rows = list(rows_of(Path(sys.argv[1])))
    Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
