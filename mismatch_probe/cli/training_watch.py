"""Everything that looks on while a model trains: the live screen, the run's page, trackers."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mismatch_probe.cli.output import can_go_on, narration, noise_in
from mismatch_probe.cli.process import interrupts_kept
from mismatch_probe.cli.progress import is_redrawn
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import sides_label
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import GuardEvent, StepFirings
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_count, write_number, write_percent, write_rough_seconds, write_seconds
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest
from mismatch_probe.report.training.course import times
from mismatch_probe.report.training.page import write_training_report
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.trackers import track
from mismatch_probe.train.trainer import StepListener

_REFRESHES_A_SECOND = 2
_STEPS_SHOWN = 48
_EVENTS_SHOWN = 5
_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_MILD = frozenset({ActionKind.LOG, ActionKind.WARN})
_COURSES = {"reward/mean": False, "mismatch/kl_k3": True, "policy/entropy": False}
"""Metrics whose course is drawn, and whether on a logarithmic scale."""


@contextmanager
def training_screen(console: Console, directory: TrainingDirectory, steps: int) -> Iterator[StepListener]:
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
    drawn_values = [_logarithm(value) if logarithmic else value for value in values]
    finite = [value for value in drawn_values if math.isfinite(value)]
    if not finite:
        return _NOT_FINITE * len(drawn_values)
    low, spread = min(finite), max(finite) - min(finite)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round(top * (value - low) / spread) if spread else 0] if math.isfinite(value) else _NOT_FINITE
        for value in drawn_values
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
        self._seconds: deque[float] = deque(maxlen=_STEPS_SHOWN)
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
        return Group(_title(self._manifest), self._progress(), self._pace(), *self._screen_values())

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

    def _screen_values(self) -> Iterator[RenderableType]:
        if not self._metrics:
            return
        rows = Table.grid(padding=(0, 2))
        rows.add_row("reward", self._number("reward/mean"), self._course("reward/mean"))
        rows.add_row("mismatch (k3)", self._number("mismatch/kl_k3"), self._course("mismatch/kl_k3"))
        rows.add_row("entropy", self._number("policy/entropy"), self._course("policy/entropy"))
        low, high = (self._number(f"mismatch/prob_diff_{end}") for end in ("min", "max"))
        rows.add_row("pi − mu", high, Text(f"down to {low}", style="dim"))
        rows.add_row("gradient norm", self._number("optim/grad_norm"), self._scale())
        truncated_share = write_percent(self._metrics["response/truncated_share"])
        rows.add_row(
            "length",
            self._number("response/length_mean"),
            Text(f"tokens, {truncated_share} cut at the limit", style="dim"),
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
            on = len(self._manifest.guards) - len(self._manifest.guards_off)
            yield Text("guards silent" + (f", {write_count(on)} on" if on else ""), style="green")
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


_COLUMNS = (
    ("reward", "reward/mean"),
    ("k3", "mismatch/kl_k3"),
    ("pi-mu max", "mismatch/prob_diff_max"),
    ("entropy", "policy/entropy"),
    ("grad", "optim/grad_norm"),
    ("length", "response/length_mean"),
    ("s", "time/step_seconds"),
)
_STEPS_TIMED: Final = 20
_SHARE_OF_TIME: Final = 0.01
_FIRST_COST_SECONDS: Final = 1.0


@contextmanager
def training_listener(
    command: str, directory: TrainingDirectory, settings: TrainSettings, *, is_new: bool
) -> Iterator[tuple[Console, StepListener]]:
    """A console on stderr and a listener as of `watch_training`, while what libraries print goes to the run's log.

    Raises:
        MissingExtra, UsageError: as `watch_training`.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    consequence = "What was done up to the last checkpoint is kept."
    with (
        can_go_on(
            command, directory, settings.model_dump(), narration(), is_new=is_new and is_main(), consequence=consequence
        ),
        interrupts_kept(),
        noise_in(directory.log_path("train")) as quiet,
        watch_training(quiet, directory, settings) as listener,
    ):
        yield quiet, listener


@contextmanager
def watch_training(console: Console, directory: TrainingDirectory, settings: TrainSettings) -> Iterator[StepListener]:
    """A listener that shows each step, keeps the run's page up to date, and reports to the chosen trackers.

    Raises:
        MissingExtra: a tracker is not installed.
        UsageError: a tracker needs an account that is not set up.
    """

    def tell(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, highlight=False)

    with (
        training_view(console, directory, settings.steps) as view,
        training_report(directory, tell) as report,
        track(directory, settings, tell) as trackers,
    ):

        def listen(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
            for listener in (view, report, trackers):
                listener(step, metrics, decision)

        yield listen


@contextmanager
def training_view(console: Console, directory: TrainingDirectory, steps: int) -> Iterator[StepListener]:
    """A listener that shows each step, for as long as the run goes on; ranks other than the first show nothing."""
    if not is_main():
        yield lambda step, metrics, decision: None
        return
    console.print(f"Run directory: {directory.path}", soft_wrap=True, highlight=False)
    if is_redrawn(console):
        with training_screen(console, directory, steps) as screen:
            yield screen
        return

    console.print("starting the engine and the policy", soft_wrap=True, highlight=False)
    seconds: deque[float] = deque(maxlen=_STEPS_TIMED)

    def print_line(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        seconds.append(metrics["time/step_seconds"])
        seconds_left = sum(seconds) / len(seconds) * (steps - step)
        values = "  ".join(f"{title} {write_number(metrics[name])}" for title, name in _COLUMNS)
        ends = f"  about {write_rough_seconds(seconds_left)} left" if seconds_left else ""
        console.print(f"step {step}/{steps}  {values}{ends}", soft_wrap=True, highlight=False)
        for event in decision.events:
            actions = ", ".join(str(action) for action in event.actions)
            console.print(f"  guard {event.guard}: {event.sentence} [{actions}]", soft_wrap=True, highlight=False)

    yield print_line


@contextmanager
def training_report(directory: TrainingDirectory, tell: Callable[[str], None]) -> Iterator[StepListener]:
    """A listener that writes the page now and then, for a hundredth of the run's time; once more on leaving, however
    the run ended. `tell` says a sentence to the user, where the page cannot be written.
    """
    page = _TrainingPage(directory, tell)
    try:
        yield page
    finally:
        if is_main():
            page.write()


class _TrainingPage:
    def __init__(self, directory: TrainingDirectory, tell: Callable[[str], None]) -> None:
        self._directory = directory
        self._tell = tell
        self._written_at = time.monotonic()
        self._cost_seconds = _FIRST_COST_SECONDS
        self._has_warned = False

    def __call__(self, step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        if is_main() and time.monotonic() - self._written_at > self._cost_seconds / _SHARE_OF_TIME:
            self.write()

    def write(self) -> None:
        """A page that cannot be written gives one warning and ends no training."""
        start = time.monotonic()
        try:
            write_training_report([self._directory], self._directory.report_path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training is worth more
            if not self._has_warned:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"report.html is not written ({reason}); the run goes on")
            self._has_warned = True
        self._written_at = time.monotonic()
        self._cost_seconds = self._written_at - start
