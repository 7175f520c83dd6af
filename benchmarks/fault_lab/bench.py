"""Where faults are injected, and what an injected fault is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.fault_lab.in_log import Edit, edit_leg
from benchmarks.fault_lab.in_training import opened, with_settings
from benchmarks.fault_lab.models import CHATS, PROMPTS
from benchmarks.fault_lab.recording import (
    FAULT_DTYPES,
    BenchRun,
    OpenScorer,
    TrainingSide,
    copy_of,
    keep_pairs,
    record,
    score_again,
)
from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.run_directory import RunDirectory

Where = Literal["log", "training", "engine"]
INJECTED = "injected"
"""A file that tells that a faulty run is complete."""

Make = Callable[["Bench"], BenchRun]

VARIANTS: dict[str, dict[str, Any]] = {
    "autocast": {"precision": "autocast"},
    "fsdp": {"precision": "fsdp"},
    "eager attention": {"attention": "eager"},
    "fp32 head": {"lm_head_dtype": "fp32"},
}
"""Settings of the training path that trainers use and that are no fault."""

UNSOUND = {("qwen3-moe", "autocast")}
"""torch.autocast leaves the experts' grouped products in FP32, which the verdict calls `dtype_not_applied`."""


@dataclass(frozen=True)
class Injection:
    """One fault at one strength; `usual` marks the strengths that a user would meet. `make` writes the run.

    expected: the causes that are right; where there are several, each is a true account of the fault.
    """

    fault: str
    strength: str
    where: Where
    usual: bool
    expected: tuple[Code, ...]
    make: Make


def at_strengths(
    fault: str, where: Where, expected: tuple[Code, ...], strengths: Mapping[str, Make], usual: tuple[str, ...] = ()
) -> Iterator[Injection]:
    """A fault at each of its strengths, weakest first; all are usual unless `usual` names some."""
    for strength, make in strengths.items():
        yield Injection(fault, strength, where, strength in (usual or strengths), expected, make)


@dataclass(frozen=True)
class Bench:
    """A model, its clean run, and a folder for the faulty ones."""

    model: str
    checkpoint: Path
    clean: RunDirectory
    scratch: Path
    num_prompts: int
    num_tokens: int

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Those of the clean run: an engine refuses some dtypes of some models."""
        return tuple(pi.dtype for pi in self.clean.read_manifest().settings.train_sides)

    def open_clean(self, dtype: Dtype, reference: bool) -> AbstractContextManager[TrainingSide]:
        """The training path without a fault."""
        return opened(self.checkpoint, dtype, reference=reference)

    def in_log(self, name: str, edit: Edit) -> BenchRun:
        """The clean run with the training path's legs edited."""

        def inject(run: RunDirectory) -> None:
            for pi in run.read_manifest().settings.train_sides:
                edit_leg(run, pi.leg(), edit)

        return BenchRun(self.injected(name, inject), self.open_clean)

    def in_training(self, name: str, make_scorer: Callable[[], OpenScorer]) -> BenchRun:
        """The clean run's responses scored again by a faulty training path."""

        def open_scorer(dtype: Dtype, reference: bool) -> AbstractContextManager[TrainingSide]:
            return make_scorer()(dtype, reference)

        return BenchRun(self.injected(name, lambda run: score_again(run, make_scorer())), open_scorer)

    def clean_variants(self) -> Iterator[tuple[str, BenchRun]]:
        """The clean run as recorded, and scored by a training path under other sound settings."""
        yield "as recorded", BenchRun(self.clean, self.open_clean)
        for variant, settings in VARIANTS.items():
            if (self.model, variant) in UNSOUND:
                continue
            scorer = with_settings(self.checkpoint, **settings)
            run = self.injected(variant, partial(score_again, open_scorer=scorer), self.dtypes)
            yield variant, BenchRun(run, scorer)

    def in_engine(
        self, name: str, *, checkpoint: Path | None = None, sampling: dict[str, Any] | None = None, **engine_args: Any
    ) -> BenchRun:
        """The engine runs with the fault; the training path scores its responses without."""
        path = self.scratch / "engine" / self.model / name
        if (path / INJECTED).exists():
            return BenchRun(RunDirectory(path), self.open_clean)
        run = record(
            path,
            checkpoint or self.checkpoint,
            PROMPTS.get(self.model, CHATS),
            FAULT_DTYPES,
            num_prompts=self.num_prompts,
            num_tokens=self.num_tokens,
            sampling=sampling,
            engine_args=engine_args,
        )
        if checkpoint is not None or sampling is not None:
            score_again(run, self.open_clean)
        (path / INJECTED).touch()
        return BenchRun(run, self.open_clean)

    def edited(self, name: str) -> Path:
        """Where an edited checkpoint goes."""
        return self.scratch / "checkpoints" / f"{self.model}-{name}"

    def injected(
        self, name: str, inject: Callable[[RunDirectory], None], dtypes: Sequence[Dtype] = FAULT_DTYPES
    ) -> RunDirectory:
        """A copy of the clean run with the fault, or the one that is there already."""
        path = self.scratch / "faulty" / self.model / name
        if (path / INJECTED).exists():
            return RunDirectory(path)
        run = copy_of(self.clean, path)
        keep_pairs(run, dtypes)
        inject(run)
        (path / INJECTED).touch()
        return run
