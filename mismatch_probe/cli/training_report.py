"""`report.html` of a run while it goes on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from mismatch_probe.guards.decision import StepFirings
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.report.training import write_training_report
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.trainer import Listener

_SHARE_OF_TIME: Final = 0.01
_FIRST_COST_SECONDS: Final = 1.0


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
