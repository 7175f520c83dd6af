"""Memory and time of a model that ranks hold, at three sizes, and what they foretell for a fourth.

    python -m benchmarks.ranks [--publish reports/ranks.md]

Checkpoints have random weights. Each way scores the same responses in FP32: one process, FSDP2 over two ranks, tensor
parallelism over two. Memory is what the last rank holds at most above what it held before it loaded; nothing that is
freed is kept. (The first rank also holds the whole model once, for a short pass, where there is room.) It is set beside
`compare.cost.stage_work`, which a comparison is sized with. Time is told as a ratio to one process in the same run. The
fourth size's memory and time are foretold by lines through the three others.
"""

import argparse
import json
import os
import platform
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Job, RankPlace, in_place, places_here, run_together
from mismatch_probe.compare.cost.roofline import Architecture
from mismatch_probe.compare.cost.stage_work import rank_weight_bytes
from mismatch_probe.compare.preflight import count
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import rank_group
from mismatch_probe.training_path.scorer import RanksScorer, Scorer, follow
from tests.tiny_models import make_checkpoint

SIZES: Final = ((384, 6), (512, 8), (640, 10), (768, 12))
"""Hidden size and layers; the last one is foretold."""
WAYS: Final = {
    "one process": TrainingPathSettings(),
    "FSDP2 over 2": TrainingPathSettings(ranks=2),
    "tensor parallel over 2": TrainingPathSettings(ranks=2, tensor_parallel=2),
}
_VOCABULARY: Final = 1024
_RESPONSES, _TOKENS = 4, 128
_REPEATS: Final = 3
_SAMPLE_SECONDS: Final = 0.002
_MEGABYTE: Final = 1e6


@dataclass(frozen=True)
class Measured:
    """bytes: the most that a rank held. seconds: the fastest of a few scorings."""

    size: int
    way: str
    bytes: int
    seconds: float


class _MostResident:
    """The most resident memory of this process, above what it has at the start, in bytes."""

    def __enter__(self) -> "_MostResident":
        self._before = self.most = _resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def above(self) -> int:
        return self.most - self._before

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.most = max(self.most, _resident_bytes())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(size: int, way: str, folder: Path) -> Measured:
    settings = WAYS[way]
    ranks = settings.num_ranks or 1
    with TemporaryDirectory() as scratch, places_here(ranks) as places:
        noted = str(Path(scratch) / "bytes")
        arguments = (str(folder), settings.model_dump(mode="json"), noted)
        jobs = [
            in_place(Job(way, follows if place.rank else leads, arguments, "training", ""), place) for place in places
        ]
        seconds = run_together(jobs[0], jobs[1:], lambda message: None)
        return Measured(size, way, json.loads(Path(noted).read_text()), seconds)


def leads(send: Send, folder: str, settings: dict[str, Any], noted: str, place: dict[str, Any]) -> float:
    """Score as the first rank; the seconds of the fastest time."""
    random = np.random.default_rng(0)
    batch = [
        TokenSequence(str(row), [1], random.integers(0, _VOCABULARY, _TOKENS).tolist()) for row in range(_RESPONSES)
    ]
    path_settings = TrainingPathSettings.model_validate(settings)
    load = Scorer.load if path_settings.num_ranks is None else RanksScorer
    if path_settings.num_ranks is not None:
        rank_group.join(RankPlace.from_json(place))
    seconds = []
    with Noting(noted, place), load(Path(folder), Dtype.FP32, path_settings) as scorer:
        for _ in range(_REPEATS):
            began = time.perf_counter()
            scorer.score_batch(batch)
            seconds.append(time.perf_counter() - began)
    if path_settings.num_ranks is not None:
        rank_group.dismiss()
    return min(seconds)


def follows(send: Send, folder: str, settings: dict[str, Any], noted: str, place: dict[str, Any]) -> None:
    with Noting(noted, place):
        follow(RankPlace.from_json(place))


class Noting(_MostResident):
    """Writes the last rank's memory down."""

    def __init__(self, noted: str, place: dict[str, Any]) -> None:
        self._noted, self._is_last = Path(noted), place["rank"] == place["ranks"] - 1

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._is_last:
            self._noted.write_text(json.dumps(self.above))


def line_through(numbers: Sequence[float], results: Sequence[float]) -> tuple[float, float]:
    """Slope, and the value foretold for the last number, of a line through all results but the last."""
    slope, start = np.polyfit(numbers[:-1], results[:-1], 1)
    return float(slope), float(start + slope * numbers[-1])


def weight_bytes(way: str, size: Architecture) -> float:
    settings = WAYS[way]
    return rank_weight_bytes(size, 4, ranks=settings.num_ranks or 1, tensor_parallel=settings.tensor_parallel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", type=Path)
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**17))
    publish: Path | None = parser.parse_args().publish
    measured: dict[str, list[Measured]] = {way: [] for way in WAYS}
    sizes: list[Architecture] = []
    with TemporaryDirectory() as home:
        for number, (hidden, layers) in enumerate(SIZES):
            folder = make_checkpoint(
                Path(home) / str(number), "llama", init_std=0.02, vocab_size=_VOCABULARY, hidden_size=hidden,
                intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
                num_key_value_heads=2, head_dim=64,
            )  # fmt: skip
            sizes += count({"model": str(folder)}).all().values()
            for way in WAYS:
                measured[way].append(measure(number, way, folder))
    page = written(sizes, measured)
    print(page)
    if publish is not None:
        publish.write_text(page + "\n", encoding="utf-8")


def written(sizes: Sequence[Architecture], measured: dict[str, list[Measured]]) -> str:
    lines = [
        "# Ranks: memory and time at three sizes, and a fourth that was foretold",
        "",
        f"{_RESPONSES} responses of {_TOKENS} tokens in FP32, vocabulary {_VOCABULARY}. Memory of the last rank, MB",
        "above an idle process; in brackets what the cost model says of its weights. Time against one process's.",
        "",
        "| parameters | way | memory (weights) | time, of one process's |",
        "|---|---|---|---|",
    ]
    for number, size in enumerate(sizes):
        for way, results in measured.items():
            result, alone = results[number], measured["one process"][number]
            weights = weight_bytes(way, size) / _MEGABYTE
            lines.append(
                f"| {size.parameters / 1e6:.1f} M | {way} | {result.bytes / _MEGABYTE:.0f} ({weights:.0f}) | "
                f"{result.seconds / alone.seconds:.2f} |"
            )
    lines += [
        "",
        "The largest, foretold by lines through the others: memory over weights, time over parameters.",
    ]
    lines += ["", "| way | bytes for one of the model's | memory foretold | measured | time measured / foretold |"]
    lines += ["|---|---|---|---|---|"]
    for way, results in measured.items():
        slope, memory = line_through([weight_bytes(way, size) for size in sizes], [result.bytes for result in results])
        _, seconds = line_through([size.parameters for size in sizes], [result.seconds for result in results])
        last = results[-1]
        lines.append(
            f"| {way} | {slope:.2f} | {memory / _MEGABYTE:.0f} MB | {last.bytes / _MEGABYTE:.0f} MB | "
            f"{last.seconds / seconds:.2f} |"
        )
    lines += [
        "",
        "Memory counts pages of the checkpoint's file while they are mapped. Tensor parallelism needs more than its",
        "weights, which comes from loading or from what ranks exchange; that was not taken apart.",
        "",
        f"Made by `python -m benchmarks.ranks --publish reports/ranks.md` with torch {torch.__version__} on",
        f"{platform.machine()}, two cores that others used as well. Both ranks share those cores: time here",
        "says what ranks cost, not what more processors gain.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
