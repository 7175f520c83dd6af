"""What rounding leaves of an update: `python -m scripts.moved_weights BEFORE AFTER`, two checkpoints of one run.

Both hold FP32 master weights; policy and engine compute with what BF16 or FP16 makes of them. A change of less than
half the distance to the next number of the format moves nothing where the weight was such a number before, as every
weight of a checkpoint in BF16 is.
"""

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


if __name__ == "__main__":
    for dtype, sums in compare_checkpoints(Path(sys.argv[1]), Path(sys.argv[2])).items():
        moved = f"{sums.moved / sums.weights:.1%} of {sums.weights:,} weights moved"
        print(f"{side_label(dtype)}: {moved}, {sums.passed_on:.1%} of the change is there")
