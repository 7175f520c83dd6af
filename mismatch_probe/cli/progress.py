"""How far a command is, in one line: redrawn on a terminal, elsewhere printed as a stage begins and now and then."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mismatch_probe.compare.cost.forecast import RunClock
from mismatch_probe.compare.cost.roofline import ProcessName
from mismatch_probe.compare.plan import (
    AnyEvent,
    BatchDone,
    EffectiveSettings,
    JobStarted,
    LayersDone,
    PlannedJob,
    RequestsDone,
    StageDone,
    StageStarted,
    plan_of,
)
from mismatch_probe.compare.stages import (
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    FloorStage,
    FullVocabularyStage,
    ReplayStage,
    RoutingStage,
    SampleStage,
    ScoreStage,
    Stage,
)
from mismatch_probe.dtypes import side_label
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_rough_seconds
from mismatch_probe.records.run_directory import RunDirectory

LINE_EVERY_SECONDS: Final = 30.0
_REDRAWN_A_SECOND: Final = 4
_FEW_SECONDS: Final = 10.0
_WORTH_SAYING_SECONDS: Final = 3.0
"""The line of a stage that takes longer shows how long it has been running."""
_NEAR: Final = 0.2
"""A new estimate this near to the shown time changes nothing."""
_SLIDING_SECONDS: Final = 10.0
"""The shown time comes near to an estimate that is farther in a few times this long."""

_COUNT: Final = re.compile(r"[\d,]+ of [\d,]+")
"""What a narrow line keeps of how far a part is."""

Left = Callable[[], float | None]


class _Countdown:
    """A remaining time that runs down by the clock, and slides to an estimate that is far from it."""

    def __init__(self, estimate: Left) -> None:
        self._estimate = estimate
        self._seconds: float | None = None
        self._since = time.monotonic()

    def __call__(self) -> float | None:
        """The seconds to show; None while nothing predicts them."""
        instant, estimate = time.monotonic(), self._estimate()
        interval, self._since = instant - self._since, instant
        if estimate is None or self._seconds is None:
            self._seconds = estimate
            return estimate
        expectation = max(self._seconds - interval, 0.0)
        if abs(estimate - expectation) > _NEAR * max(estimate, expectation):
            expectation += (estimate - expectation) * (1 - math.exp(-interval / _SLIDING_SECONDS))
        self._seconds = expectation
        return expectation


class Announcement:
    """The time that is left by what a child process said last, and by the clock since then."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._since = time.monotonic()

    def hear(self, seconds: float | None) -> None:
        """None: what is done now has no known time, and what was said before holds no longer."""
        self._seconds, self._since = seconds, time.monotonic()

    def remaining(self) -> float | None:
        return None if self._seconds is None else max(0.0, self._seconds - (time.monotonic() - self._since))


class ProgressLine:
    """`part 5 of 8, about 2 min left: the training path scores in FP32, 3 of 16 batches`; made by `progress_line`.

    remaining: the seconds that all parts still need; None while nothing predicts them.
    """

    def __init__(self, console: Console, remaining: Left, first: str) -> None:
        self._console = console
        self._remaining_seconds = _Countdown(remaining)
        self._is_redrawn = is_redrawn(console)
        self._place, self._doing, self._detail = "", first, ""
        self._since = self._printed_at = time.monotonic()

    def begin(self, doing: str, number: int | None = None, of: int = 0, detail: str = "") -> None:
        """What is done from now on: the part `number`, from 1, of so many, or something that has none."""
        place = "" if number is None else f"part {number} of {of}"
        is_unchanged = (place, doing) == (self._place, self._doing) and not detail
        self._place, self._doing, self._detail = place, doing, detail
        self._since = time.monotonic()
        if not is_unchanged:
            self._print()

    def at(self, doing: str, number: int, of: int, detail: str) -> None:
        """How far it is with what may be another part by now."""
        if (self._doing, self._place) == (doing, f"part {number} of {of}"):
            self.go_on(detail)
        else:
            self.begin(doing, number, of, detail)

    def go_on(self, detail: str) -> None:
        """How far it is with that."""
        self._detail = detail
        if time.monotonic() - self._printed_at >= LINE_EVERY_SECONDS:
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
        line, count = str(self), _COUNT.match(self._detail)
        count_line = line if count is None else line.removesuffix(self._detail) + count[0]
        least = count_line.removeprefix("part ").replace(", about ", ", ", 1)
        forms = (f"{line}{going_on}", f"{count_line}{going_on}", count_line, least)
        text = next((form for form in forms if len(form) <= self._console.width), least)
        return Text(plain(text), style="dim", no_wrap=True, overflow="ellipsis")

    def _print(self) -> None:
        self._printed_at = time.monotonic()
        if not self._is_redrawn:
            self.say(str(self))

    @contextmanager
    def _live(self) -> Iterator[Self]:
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
    with ProgressLine(console, remaining, first)._live() as line:
        yield line


_STARTING: Final[dict[ProcessName, str]] = {
    "engine": "starting the engine",
    "server": "asking the server",
    "training": "loading the model on the training path",
}


class Later(NamedTuple):
    """One more part, which follows the run and has a line of its own: its name, and how long it is expected to take."""

    name: str
    seconds: float | None


@contextmanager
def progress_listener(
    console: Console,
    run: RunDirectory,
    clock: RunClock | None = None,
    further: Mapping[str, str] = MappingProxyType({}),
    last_part: Later | None = None,
) -> Iterator[Callable[[AnyEvent], None]]:
    """A listener for the events of a run, for as long as the run goes on; `clock` knows how much of it is left.

    further: what the stages behind those of the run's plan do, by their names; no clock knows them. last_part: what
    follows all of them; the time that is left includes it, or is not shown where nobody knows how long that takes.
    """
    console.print(f"Run directory: {run.path}", soft_wrap=True, highlight=False)

    def remaining() -> float | None:
        if further:
            return progress.left_of_last()
        span = None if clock is None else clock.remaining()
        later_seconds = 0.0 if last_part is None else last_part.seconds
        return None if span is None or later_seconds is None else span.likely_seconds + later_seconds

    with progress_line(console, remaining, first="starting") as line:
        progress = _Progress(line, run, further, last_part)

        def hear(event: AnyEvent) -> None:
            if clock is not None:
                clock(event)
            progress(event)

        yield hear


class _Progress:
    def __init__(
        self, line: ProgressLine, run: RunDirectory, further: Mapping[str, str], last_part: Later | None
    ) -> None:
        self._line = line
        self._run = run
        self._further = further
        self._parts_later = 0 if last_part is None else 1
        self._stages: dict[str, tuple[str, str]] = {}
        """Of each stage that has something to do, its part of the run and what it does, in words."""
        self._stage = ""
        self._tokens = self._total = self._batches_done = self._batches_timed = 0
        self._seconds = 0.0

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, JobStarted):
            self._begin(event.stages[0], _STARTING[event.process])
        elif isinstance(event, EffectiveSettings) and event.settings.get("by_layer") is not None:
            self._line.say(f"{event.stage}: layer by layer, since {event.settings['by_layer']['why']}")
        elif isinstance(event, StageStarted):
            self._stage = event.stage
            self._tokens, self._batches_timed, self._seconds = 0, 0, 0.0
            self._total, self._batches_done = event.batches, event.batches_done
            if event.batches:
                batches_recorded = (
                    f"{event.batches_done} of {event.batches} batches recorded" if event.batches_done else ""
                )
                self._begin(event.stage, None, batches_recorded)
        elif isinstance(event, RequestsDone) and event.of > 1:
            where = f" of batch {self._batches_done + 1} of {self._total}" if self._total > 1 else ""
            self._line.go_on(f"{event.done} of {event.of} responses{where}")
        elif isinstance(event, LayersDone):
            self._line.go_on(f"{event.done} of {event.of} layers of all batches")
        elif isinstance(event, BatchDone):
            self._batches_done += 1
            self._batches_timed += 1
            self._tokens += event.tokens
            self._seconds += event.seconds
            rate = self._tokens / self._seconds
            pace = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            self._line.go_on(f"{self._batches_done} of {self._total} batches, {pace} tokens/s")
        elif isinstance(event, StageDone):
            self._end(event)

    def left_of_last(self) -> float | None:
        """Seconds that the last stage still needs, by its own batches; None before, and until one is done."""
        if self._stage != self._last or not self._batches_timed:
            return None
        return self._seconds / self._batches_timed * (self._total - self._batches_done)

    @property
    def _last(self) -> str | None:
        return next(reversed(self._stages), None)

    def _begin(self, stage: str, doing: str | None, detail: str = "") -> None:
        """doing: what is done, where it is not what the stage does."""
        if stage not in self._stages:
            self._stages = _parts_of_run(self._run) | {name: (name, words) for name, words in self._further.items()}
        if stage in self._stages:
            part, words = self._stages[stage]
            parts = _names_of_parts(self._stages)
            self._line.begin(doing or words, parts.index(part) + 1, len(parts) + self._parts_later, detail)
        else:
            self._line.begin(doing or stage.replace("-", " "), detail=detail)

    def _end(self, event: StageDone) -> None:
        if event.stage == self._last:
            self._line.begin("statistics and verdict")


def number_of_later_part(run: RunDirectory) -> int:
    """Of the part that follows all of a run's own."""
    return len(_names_of_parts(_parts_of_run(run))) + 1


def _parts_of_run(run: RunDirectory) -> dict[str, tuple[str, str]]:
    """Of each stage that has something to do, its part of the run and what it does, in words."""
    manifest = run.read_manifest()
    return {
        planned_stage.name: (_part_of(job, planned_stage), stage_words(planned_stage))
        for job in plan_of(manifest).jobs
        for planned_stage in job.stages
        if manifest.stages[planned_stage.name].state != "skipped"
    }


def _names_of_parts(stages: Mapping[str, tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(part for part, _ in stages.values()))


def _part_of(job: PlannedJob, stage: Stage) -> str:
    """Stages that people take for one: those of an engine, of the reference, or of a training side. What a run scores
    once its pairs are judged is a part of its own, since parts only go forward.
    """
    if stage.side.role == "mu" or job.is_rounding_check:
        return job.name
    return stage.side.role if stage.side.role == "ref" else stage.side.name


_STAGE_WORDS: Final[dict[type, str]] = {
    SampleStage: "{who} samples in {side}",
    ReplayStage: "{who} scores its own responses in {side}",
    EngineFloorStage: "{who} measures its noise floor in {side}",
    DecodeAloneStage: "{who} measures its noise floor in {side}",
    EngineRoutingStage: "{who} records its choice of experts in {side}",
    DistributionsStage: "{who} gives its whole vocabulary in {side}",
    ScoreStage: "{who} scores the responses in {side}",
    FloorStage: "{who} measures its noise floor in {side}",
    RoutingStage: "{who} records its choice of experts in {side}",
    FullVocabularyStage: "{who} compares the whole vocabulary in {side}",
}


def stage_words(stage: Stage) -> str:
    """What a stage does: `the engine samples in BF16`."""
    side = stage.side
    if side.role == "ref":
        if side.rounded_to is not None:
            return f"the {side_label(side.dtype)} reference with {side_label(side.rounded_to)} weights scores"
        return f"the {side_label(side.dtype)} reference scores the responses"
    is_server = side.engine is not None and side.engine.is_remote
    who = "the training path" if side.engine is None else "the server" if is_server else "the engine"
    return _STAGE_WORDS[type(stage)].format(who=who, side=side_label(side.name))
