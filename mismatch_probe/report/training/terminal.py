"""What came of a run, on the terminal."""

from rich.console import Console

from mismatch_probe.records.training_run import TrainingSummary
from mismatch_probe.report.screen import print_line
from mismatch_probe.report.training.headline import run_headline
from mismatch_probe.report.training.overview import events


def render_outcome(summary: TrainingSummary, console: Console, label: str = "") -> None:
    """The page's headline after a label, why the run stopped, and each guard that fired."""
    headline = run_headline(summary).striptags()
    print_line(console, f"{label}: {headline}" if label else headline, "bold")
    for sentence in events(summary):
        print_line(console, sentence)
