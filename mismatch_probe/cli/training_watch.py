"""Everything that looks on while a model trains."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from mismatch_probe.cli.interrupts import interrupts_kept
from mismatch_probe.cli.output import can_go_on, narration, noise_in
from mismatch_probe.cli.progress import is_redrawn
from mismatch_probe.cli.training_screen import training_screen
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.guards.decision import StepFirings
from mismatch_probe.notation import write_number, write_rough_seconds
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.report.training import write_training_report
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.trackers import tracked
from mismatch_probe.train.trainer import Listener

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
def training_told(
    command: str, directory: TrainingDirectory, settings: TrainSettings, *, is_new: bool
) -> Iterator[tuple[Console, Listener]]:
    """A console on stderr and a listener as of `watched`, while what libraries print goes to the run's log.

    Raises:
        MissingExtra, UsageError: as `watched`.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    kept = "What was done up to the last checkpoint is kept."
    with (
        can_go_on(command, directory, settings.model_dump(), narration(), is_new=is_new and is_main(), kept=kept),
        interrupts_kept(),
        noise_in(directory.log_path("train")) as quiet,
        watched(quiet, directory, settings) as listener,
    ):
        yield quiet, listener


@contextmanager
def watched(console: Console, directory: TrainingDirectory, settings: TrainSettings) -> Iterator[Listener]:
    """A listener that shows each step, keeps the run's page, and tells the trackers asked for.

    Raises:
        MissingExtra: a tracker is not installed.
        UsageError: a tracker needs an account that is not set up.
    """

    def tell(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, highlight=False)

    with (
        training_view(console, directory, settings.steps) as view,
        training_report(directory, tell) as report,
        tracked(directory, settings, tell) as trackers,
    ):

        def listen(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
            for listener in (view, report, trackers):
                listener(step, metrics, decision)

        yield listen


@contextmanager
def training_view(console: Console, directory: TrainingDirectory, steps: int) -> Iterator[Listener]:
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
        left = sum(seconds) / len(seconds) * (steps - step)
        values = "  ".join(f"{title} {write_number(metrics[name])}" for title, name in _COLUMNS)
        ends = f"  about {write_rough_seconds(left)} left" if left else ""
        console.print(f"step {step}/{steps}  {values}{ends}", soft_wrap=True, highlight=False)
        for event in decision.events:
            actions = ", ".join(str(action) for action in event.actions)
            console.print(f"  guard {event.guard}: {event.sentence} [{actions}]", soft_wrap=True, highlight=False)

    yield print_line


@contextmanager
def training_report(directory: TrainingDirectory, tell: Callable[[str], None]) -> Iterator[Listener]:
    """A listener that writes the page now and then, for a hundredth of the run's time; once more on leaving, however
    the run ended. `tell` says a sentence to the user, where the page cannot be written.
    """
    page = _Page(directory, tell)
    try:
        yield page
    finally:
        if is_main():
            page.write()


class _Page:
    def __init__(self, directory: TrainingDirectory, tell: Callable[[str], None]) -> None:
        self._directory = directory
        self._tell = tell
        self._written_at = time.monotonic()
        self._cost_seconds = _FIRST_COST_SECONDS
        self._told = False

    def __call__(self, step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        if is_main() and time.monotonic() - self._written_at > self._cost_seconds / _SHARE_OF_TIME:
            self.write()

    def write(self) -> None:
        """A page that cannot be written is said once; it ends no training."""
        begun = time.monotonic()
        try:
            write_training_report([self._directory], self._directory.report_path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training is worth more
            if not self._told:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"report.html is not written ({reason}); the run goes on")
            self._told = True
        self._written_at = time.monotonic()
        self._cost_seconds = self._written_at - begun
