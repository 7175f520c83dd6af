"""Everything that looks on while a model trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from mismatch_probe.cli.training_report import training_report
from mismatch_probe.cli.training_view import training_view
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.guards.decision import StepFirings
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.trackers import tracked
from mismatch_probe.train.trainer import Listener


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
