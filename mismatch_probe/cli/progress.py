"""Progress on stderr: stage, rate and time left; a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mismatch_probe.compare.cost.clock import RunClock
from mismatch_probe.compare.events import (
    AnyEvent,
    BatchDone,
    EffectiveSettings,
    RequestsDone,
    StageDone,
    StageStarted,
)
from mismatch_probe.notation import write_about
from mismatch_probe.records.run_directory import RunDirectory

_LINE_EVERY_SECONDS = 10.0


@contextmanager
def progress_listener(
    console: Console, run: RunDirectory, clock: RunClock | None = None
) -> Iterator[Callable[[AnyEvent], None]]:
    """A listener for the events of a run, for as long as the run goes on; `clock` tells how much of all is left."""
    console.print(f"Run directory: {run.path}", soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield _heard_by(clock, _Lines(console, clock))
        return
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _heard_by(clock, _Bars(progress, clock))


def _heard_by(clock: RunClock | None, show: Callable[[AnyEvent], None]) -> Callable[[AnyEvent], None]:
    def hear(event: AnyEvent) -> None:
        if clock is not None:
            clock(event)
        show(event)

    return hear


def _all_left(clock: RunClock | None) -> str:
    """`about 4 min (2 to 8) left in all`; empty while nothing tells."""
    left = None if clock is None else clock.left()
    if left is None or not left.likely_seconds:
        return ""
    return f"{write_about(left.likely_seconds, left.low_seconds, left.high_seconds)} left in all"


class _Rate:
    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def add(self, event: BatchDone) -> None:
        self._tokens += event.tokens
        self._seconds += event.seconds

    def __str__(self) -> str:
        return f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else "starting"


class _Bars:
    def __init__(self, progress: Progress, clock: RunClock | None) -> None:
        self._progress = progress
        self._clock = clock
        self._whole = None if clock is None else progress.add_task("whole run", total=None, rate="")
        self._tasks: dict[str, TaskID] = {}
        self._rates: dict[str, _Rate] = {}

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, EffectiveSettings) and event.stage not in self._tasks:
            self._tasks[event.stage] = self._progress.add_task(event.stage, total=None, rate="starting")
        elif isinstance(event, StageStarted):
            if event.stage not in self._tasks:
                self._tasks[event.stage] = self._progress.add_task(event.stage, total=None, rate="starting")
            task = self._tasks[event.stage]
            self._progress.update(task, total=event.batches, completed=event.batches_done)
        elif isinstance(event, RequestsDone):
            self._progress.update(self._tasks[event.stage], rate=f"{event.done} of {event.of} requests")
        elif isinstance(event, BatchDone):
            rate = self._rates.setdefault(event.stage, _Rate())
            rate.add(event)
            self._progress.update(self._tasks[event.stage], advance=1, rate=str(rate))
        elif isinstance(event, StageDone) and event.skipped:
            self._progress.update(self._tasks[event.stage], total=1, completed=1, rate=event.note)
        if self._whole is not None:
            self._progress.update(self._whole, rate=_all_left(self._clock))


class _Lines:
    def __init__(self, console: Console, clock: RunClock | None) -> None:
        self._console = console
        self._clock = clock
        self._rate = _Rate()
        self._total = self._done = self._before = 0
        self._started = self._printed = 0.0

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StageStarted):
            self._rate = _Rate()
            self._total, self._done = event.batches, event.batches_done
            self._before = event.batches_done
            self._started = self._printed = time.monotonic()
            if event.batches:
                self._print(f"{event.stage}: {event.batches_done} of {event.batches} batches recorded, starting")
        elif isinstance(event, RequestsDone):
            if self._is_due():
                where = f"batch {self._done + 1} of {self._total}"
                self._print(f"{event.stage}: {event.done} of {event.of} requests of {where}")
        elif isinstance(event, BatchDone):
            self._done += 1
            self._rate.add(event)
            if self._is_due():
                seconds_a_batch = (self._printed - self._started) / (self._done - self._before)
                left = seconds_a_batch * (self._total - self._done)
                self._print(f"{event.stage}: {self._done} of {self._total} batches, {self._rate}, {left:.0f} s left")
        elif isinstance(event, StageDone):
            self._print(f"{event.stage}: " + (f"skipped, {event.note}" if event.skipped else f"done, {self._rate}"))

    def _is_due(self) -> bool:
        """Whether it is time for another line, which is then the last one."""
        now = time.monotonic()
        if now - self._printed < _LINE_EVERY_SECONDS:
            return False
        self._printed = now
        return True

    def _print(self, line: str) -> None:
        left = _all_left(self._clock)
        self._console.print(f"{line}; {left}" if left else line, soft_wrap=True, highlight=False)
