"""The events of a comparison as one line of progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from mismatch_probe.cli.progress_line import ProgressLine, progress_line
from mismatch_probe.compare.batches import (
    AnyEvent,
    BatchDone,
    EffectiveSettings,
    JobStarted,
    LayersDone,
    RequestsDone,
    StageDone,
    StageStarted,
)
from mismatch_probe.compare.cost.clock import RunClock
from mismatch_probe.compare.cost.rates import Process
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.records.run_directory import RunDirectory

_STARTING: Final[dict[Process, str]] = {
    "engine": "starting vLLM",
    "server": "asking the server",
    "training": "loading the model on the training path",
}


@contextmanager
def progress_listener(
    console: Console, run: RunDirectory, clock: RunClock | None = None, further: Sequence[str] = ()
) -> Iterator[Callable[[AnyEvent], None]]:
    """A listener for the events of a run, for as long as the run goes on; `clock` tells how much of it is left.

    further: stages behind those of the run's plan, which no clock knows.
    """
    console.print(f"Run directory: {run.path}", soft_wrap=True, highlight=False)

    def left() -> float | None:
        if further:
            return progress.left_of_last()
        span = None if clock is None else clock.left()
        return None if span is None else span.likely_seconds

    with progress_line(console, left, first="starting") as line:
        progress = _Progress(line, run, further)

        def hear(event: AnyEvent) -> None:
            if clock is not None:
                clock(event)
            progress(event)

        yield hear


class _Progress:
    def __init__(self, line: ProgressLine, run: RunDirectory, further: Sequence[str]) -> None:
        self._line = line
        self._run = run
        self._further = further
        self._stages: list[str] = []
        self._stage = ""
        self._tokens = self._total = self._done = self._timed = 0
        self._seconds = 0.0

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, JobStarted):
            self._begin(event.stages[0], _STARTING[event.process])
        elif isinstance(event, EffectiveSettings) and event.settings.get("by_layer") is not None:
            self._line.say(f"{event.stage}: layer by layer, since {event.settings['by_layer']['why']}")
        elif isinstance(event, StageStarted):
            self._stage = event.stage
            self._tokens, self._timed, self._seconds = 0, 0, 0.0
            self._total, self._done = event.batches, event.batches_done
            if event.batches:
                recorded = f"{event.batches_done} of {event.batches} batches recorded" if event.batches_done else ""
                self._begin(event.stage, event.stage, recorded)
        elif isinstance(event, RequestsDone):
            where = f" of batch {self._done + 1} of {self._total}" if self._total > 1 else ""
            self._line.go_on(f"{event.done} of {event.of} requests{where}")
        elif isinstance(event, LayersDone):
            self._line.go_on(f"{event.done} of {event.of} layers of all batches")
        elif isinstance(event, BatchDone):
            self._done += 1
            self._timed += 1
            self._tokens += event.tokens
            self._seconds += event.seconds
            self._line.go_on(f"{self._done} of {self._total} batches, {self._tokens / self._seconds:,.0f} tokens/s")
        elif isinstance(event, StageDone):
            self._end(event)

    def left_of_last(self) -> float | None:
        """Seconds that the last stage still needs, by its own batches; None before, and until one is done."""
        if not self._stages or self._stage != self._stages[-1] or not self._timed:
            return None
        return self._seconds / self._timed * (self._total - self._done)

    def _begin(self, stage: str, doing: str, detail: str = "") -> None:
        if stage not in self._stages:
            manifest = self._run.read_manifest()
            planned = [each.name for each in make_plan(manifest.settings).stages]
            self._stages = [name for name in planned if manifest.stages[name].state != "skipped"] + [*self._further]
        if stage in self._stages:
            self._line.begin(doing, self._stages.index(stage) + 1, len(self._stages), detail)
        else:
            self._line.begin(doing, detail=detail)

    def _end(self, event: StageDone) -> None:
        if self._stages and event.stage == self._stages[-1]:
            self._line.begin("statistics and verdict")
