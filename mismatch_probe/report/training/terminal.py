"""What came of a run, on the terminal."""

from rich.console import Console

from mismatch_probe.notation import write_percent
from mismatch_probe.records.sanity_run import PASS_ACCURACY, SanityRecord
from mismatch_probe.records.training_run import TrainingSummary
from mismatch_probe.report.screen import print_line
from mismatch_probe.report.training.headline import run_headline
from mismatch_probe.report.training.overview import events
from mismatch_probe.report.training.sanity import sanity_headline


def render_sanity(record: SanityRecord, console: Console) -> None:
    """Whether the test is passed, and what passes it."""
    print_line(console, f"{sanity_headline(record)} More than {write_percent(PASS_ACCURACY)} passes.", "bold")


def render_outcome(summary: TrainingSummary, console: Console, label: str = "") -> None:
    """The page's headline after a label, why the run stopped, and each guard that fired."""
    headline = run_headline(summary).striptags()
    print_line(console, f"{label}: {headline}" if label else headline, "bold")
    for sentence in events(summary):
        print_line(console, sentence)
