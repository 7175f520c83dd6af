"""How far a command is, in one line: redrawn on a terminal, elsewhere printed as a stage begins and now and then."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

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
from mismatch_probe.compare.cost.forecast import RunClock
from mismatch_probe.compare.cost.roofline import ProcessName
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_rough_seconds
from mismatch_probe.records.run_directory import RunDirectory

LINE_EVERY_SECONDS: Final = 30.0
_REDRAWN_A_SECOND: Final = 4
_FEW_SECONDS: Final = 10.0
_WORTH_SAYING_SECONDS: Final = 3.0
"""A stage that takes longer is told how long it has been going on."""

Left = Callable[[], float | None]


class ProgressLine:
    """`stage 5 of 27, about 2 min left: score-fp32, 3 of 16 batches`; made by `progress_line`.

    left: the seconds that all stages still need; None while nothing tells.
    """

    def __init__(self, console: Console, remaining: Left, first: str) -> None:
        self._console = console
        self._remaining_seconds = remaining
        self._is_redrawn = is_redrawn(console)
        self._place, self._doing, self._detail = "", first, ""
        self._since = self._printed = time.monotonic()

    def begin(self, doing: str, number: int | None = None, of: int = 0, detail: str = "") -> None:
        """What is done from now on: the stage `number`, from 1, of so many, or something that has none."""
        self._place = "" if number is None else f"stage {number} of {of}"
        self._doing, self._detail = doing, detail
        self._since = time.monotonic()
        self._print()

    def at(self, doing: str, number: int, of: int, detail: str) -> None:
        """How far it is with what may be another stage by now."""
        if (self._doing, self._place) == (doing, f"stage {number} of {of}"):
            self.go_on(detail)
        else:
            self.begin(doing, number, of, detail)

    def go_on(self, detail: str) -> None:
        """How far it is with that."""
        self._detail = detail
        if time.monotonic() - self._printed >= LINE_EVERY_SECONDS:
            self._print()

    def say(self, sentence: str) -> None:
        """A sentence that stays, above the line."""
        self._console.print(plain(sentence), soft_wrap=True, highlight=False)

    def __str__(self) -> str:
        remaining = self._remaining_seconds() if self._place else None
        where = [self._place, "" if remaining is None else time_left(remaining)]
        place = ", ".join(word for word in where if word)
        doing = f"{self._doing}, {self._detail}" if self._detail else self._doing
        return f"{place}: {doing}" if place else doing

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._since
        going_on = f", {seconds:.0f} s" if seconds >= _WORTH_SAYING_SECONDS else ""
        return Text(plain(f"{self}{going_on}"), style="dim", no_wrap=True, overflow="ellipsis")

    def _print(self) -> None:
        self._printed = time.monotonic()
        if not self._is_redrawn:
            self.say(str(self))

    @contextmanager
    def _shown(self) -> Iterator[Self]:
        if not self._is_redrawn:
            yield self
            return
        with Live(
            self,
            console=self._console,
            refresh_per_second=_REDRAWN_A_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield self


def time_left(seconds: float) -> str:
    """How a line says how long it will take yet."""
    return "a few seconds left" if seconds < _FEW_SECONDS else f"about {write_rough_seconds(seconds)} left"


def is_redrawn(console: Console) -> bool:
    """Whether someone watches, and a line can be written over."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def progress_line(console: Console, remaining: Left = lambda: None, first: str = "") -> Iterator[ProgressLine]:
    """The line, for as long as the work goes on; nothing of it is left on a terminal.

    first: what a terminal shows until something begins.
    """
    with ProgressLine(console, remaining, first)._shown() as line:
        yield line


_STARTING: Final[dict[ProcessName, str]] = {
    "engine": "starting the engine",
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

    def remaining() -> float | None:
        if further:
            return progress.left_of_last()
        span = None if clock is None else clock.remaining()
        return None if span is None else span.likely_seconds

    with progress_line(console, remaining, first="starting") as line:
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
