"""The live screen of a training run: progress, the last values with their course, and the guards."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mismatch_probe.dtypes import sides_label
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.decision import GuardEvent, StepFirings
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_count, write_number, write_percent, write_seconds
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest
from mismatch_probe.report.training.course import times
from mismatch_probe.train.trainer import Listener

_REFRESHES_A_SECOND = 2
_STEPS_SHOWN = 48
_STEPS_TIMED = 20
_EVENTS_SHOWN = 5
_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_MILD = frozenset({ActionKind.LOG, ActionKind.WARN})
_COURSES = {"reward/mean": False, "mismatch/kl_k3": True, "policy/entropy": False}
"""Metrics whose course is drawn, and whether on a logarithmic scale."""


@contextmanager
def training_screen(console: Console, directory: TrainingDirectory, steps: int) -> Iterator[Listener]:
    """A listener behind a screen that stays up to date, also while a step runs; its last state is left standing."""
    screen = Screen(directory, steps)
    with Live(
        screen,
        console=console,
        refresh_per_second=_REFRESHES_A_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield screen
        screen.running = False


def sparkline(values: Iterable[float], *, logarithmic: bool) -> str:
    """One block a value, lowest to highest; a cross where a value is not finite or has no logarithm."""
    shown = [_logarithm(value) if logarithmic else value for value in values]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return _NOT_FINITE * len(shown)
    low, spread = min(finite), max(finite) - min(finite)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round(top * (value - low) / spread) if spread else 0] if math.isfinite(value) else _NOT_FINITE
        for value in shown
    )


def _logarithm(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


class Screen:
    """Takes in steps as a listener; rich renders it."""

    def __init__(self, directory: TrainingDirectory, steps: int) -> None:
        self._directory = directory
        self._manifest = directory.read_training_manifest()
        self._steps = steps
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._courses: dict[str, deque[float]] = {name: deque(maxlen=_STEPS_SHOWN) for name in _COURSES}
        self._seconds: deque[float] = deque(maxlen=_STEPS_TIMED)
        self._events: deque[GuardEvent] = deque(maxlen=_EVENTS_SHOWN)
        self._num_events = 0
        self._since = time.monotonic()
        self.running = True

    def __call__(self, step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        if not self._metrics:
            self._recall(step)
        self._step, self._metrics = step, metrics
        self._take(metrics)
        self._events.extend(decision.events)
        self._num_events += len(decision.events)
        self._since = time.monotonic()

    def _recall(self, step: int) -> None:
        """The steps of a resumed run that were done before."""
        for earlier, metrics in self._directory.read_metrics():
            if earlier < step:
                self._take(metrics)

    def _take(self, metrics: Mapping[str, float]) -> None:
        for name, course in self._courses.items():
            course.append(metrics[name])
        self._seconds.append(metrics["time/step_seconds"])

    def __rich__(self) -> RenderableType:
        return Group(_title(self._manifest), self._progress(), self._pace(), *self._values())

    def _progress(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        steps = Text(f"step {write_count(self._step)} of {write_count(self._steps)}", style="bold")
        line.add_row(steps, ProgressBar(self._steps, self._step, width=32))
        return line

    def _pace(self) -> Text:
        waiting = write_seconds(time.monotonic() - self._since)
        if not self._metrics:
            return Text(f"engine, policy and first step starting, {waiting}", style="dim")
        pace = sum(self._seconds) / len(self._seconds)
        tokens = write_count(round(self._metrics["time/tokens_per_second"]))
        words = [f"{write_seconds(pace)} a step", f"{tokens} tokens/s"]
        if self.running and self._step < self._steps:
            words += [f"{write_seconds(pace * (self._steps - self._step))} left", f"this step {waiting}"]
        return Text("  ".join(words), style="dim")

    def _values(self) -> Iterator[RenderableType]:
        if not self._metrics:
            return
        rows = Table.grid(padding=(0, 2))
        rows.add_row("reward", self._number("reward/mean"), self._course("reward/mean"))
        rows.add_row("mismatch (k3)", self._number("mismatch/kl_k3"), self._course("mismatch/kl_k3"))
        rows.add_row("entropy", self._number("policy/entropy"), self._course("policy/entropy"))
        low, high = (self._number(f"mismatch/prob_diff_{end}") for end in ("min", "max"))
        rows.add_row("pi − mu", high, Text(f"down to {low}", style="dim"))
        rows.add_row("gradient norm", self._number("optim/grad_norm"), self._scale())
        cut = write_percent(self._metrics["response/truncated_share"])
        rows.add_row(
            "length", self._number("response/length_mean"), Text(f"tokens, {cut} cut at the limit", style="dim")
        )
        yield rows
        yield from self._guards()

    def _number(self, name: str) -> str:
        return write_number(self._metrics.get(name))

    def _course(self, name: str) -> Text:
        return Text(sparkline(self._courses[name], logarithmic=_COURSES[name]), style="cyan")

    def _scale(self) -> Text:
        words = f"loss scale {self._metrics['optim/loss_scale']:g}"
        if self._metrics["optim/overflow"]:
            return Text(f"{words}, update skipped: not finite", style="yellow")
        return Text(words, style="dim")

    def _guards(self) -> Iterator[RenderableType]:
        if not self._num_events:
            yield Text("guards silent", style="green")
            return
        earlier = self._num_events - len(self._events)
        yield Text(f"guards fired {times(self._num_events)}" + (", lately:" if earlier else ":"), style="bold")
        for event in self._events:
            actions = ", ".join(str(action) for action in event.actions)
            mild = all(action.kind in _MILD for action in event.actions)
            yield Text(
                f"  step {event.step}  {plain(event.guard)}: {plain(event.sentence)} [{actions}]",
                style="yellow" if mild else "red",
                overflow="ellipsis",
                no_wrap=True,
            )


def _title(manifest: TrainingManifest) -> Text:
    settings = manifest.settings
    words = (
        manifest.model.name,
        f"{settings.objective.name} on {settings.task.source}",
        sides_label(settings.train_dtype, settings.infer_dtype),
    )
    return Text(plain("  ".join(words)), style="dim")
