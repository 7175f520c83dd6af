"""`sanity.json`: which problems were kept and why, and how far training has come in solving them."""

from pathlib import Path
from typing import Final

from mismatch_probe.config.sanity import SanitySettings
from mismatch_probe.records.documents import read_document, write_document
from mismatch_probe.records.summary import Record
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.stats.results import Estimate

PASS_ACCURACY: Final = 0.95
"""More than this share of the latest responses must be right."""


class Solved(Record):
    """The responses to a problem in the latest step that sampled it: how many, how many right, and their tokens."""

    step: int
    responses: int
    solved: int
    tokens: int


TOO_FEW_STEPS: Final = "not enough"
"""The end of the verdict where only steps ran out."""


class SanityRecord(Record):
    """The whole test.

    rates: share of the starting checkpoint's responses solved, of every problem tried. kept: the problems trained on,
    None until they are chosen. latest: of each kept problem sampled so far. accuracy: share solved of `latest` once
    that holds every kept problem; its interval is clustered by problem. passed: None while training may still pass.
    verdict: what came of it, as a sentence.
    """

    sanity_version: int = 1
    settings: SanitySettings
    rates: dict[str, float] = {}
    kept: list[str] | None = None
    latest: dict[str, Solved] = {}
    step: int = 0
    accuracy: Estimate | None = None
    passed: bool | None = None
    verdict: str = "unfinished"


class SanityDirectory(TrainingDirectory):
    """A training run's directory with the test's record."""

    @property
    def sanity_path(self) -> Path:
        return self.path / "sanity.json"

    def discard_without_results(self) -> None:
        """Of a test, what tried problems earned is a result too."""
        if not self.read_sanity().rates:
            super().discard_without_results()

    def write_sanity(self, record: SanityRecord) -> None:
        write_document(self.sanity_path, record)

    def read_sanity(self) -> SanityRecord:
        """
        Raises:
            RunDirectoryError: no sanity test was started here.
            BrokenRecord: its record cannot be read by this version.
        """
        return read_document(
            self.sanity_path,
            SanityRecord,
            missing="no sanity test was started here; give another --out",
            mend="run the test again",
        )
