"""Where faults are injected, and what an injected fault is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.fault_lab.in_log import Rows, edit_leg
from benchmarks.fault_lab.in_training import opened
from benchmarks.fault_lab.models import PROMPTS
from benchmarks.fault_lab.recording import FAULT_DTYPES, OpenScorer, copy_of, keep_pairs, record, score_again
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.verdict.codes import Code

Where = Literal["log", "training", "engine"]
Make = Callable[["Bench"], RunDirectory]


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

    def in_log(self, name: str, edit: Callable[[Rows], None]) -> RunDirectory:
        """The clean run with the training path's legs edited."""
        run = self._copy(name)
        for train in run.read_manifest().settings.train_dtypes:
            edit_leg(run, f"train-{train}", edit)
        return run

    def in_training(self, name: str, open_scorer: OpenScorer) -> RunDirectory:
        """The clean run's responses scored again by a faulty training path."""
        run = self._copy(name)
        score_again(run, open_scorer)
        return run

    def in_engine(
        self, name: str, *, checkpoint: Path | None = None, sampling: dict[str, Any] | None = None, **engine_args: Any
    ) -> RunDirectory:
        """The engine runs with the fault; the training path scores its responses without."""
        run = record(
            self.scratch / "engine" / self.model / name,
            checkpoint or self.checkpoint,
            PROMPTS[self.model],
            FAULT_DTYPES,
            num_prompts=self.num_prompts,
            num_tokens=self.num_tokens,
            sampling=sampling,
            engine_args=engine_args,
        )
        if checkpoint is not None or sampling is not None:
            score_again(run, lambda dtype, reference: opened(self.checkpoint, dtype, reference=reference))
        return run

    def edited(self, name: str) -> Path:
        """Where an edited checkpoint goes."""
        return self.scratch / "checkpoints" / f"{self.model}-{name}"

    def _copy(self, name: str) -> RunDirectory:
        run = copy_of(self.clean, self.scratch / "faulty" / self.model / name)
        keep_pairs(run, FAULT_DTYPES)
        return run
