"""What came of a run, on the terminal."""

from rich.console import Console
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.records.training_run import TrainingSummary
from mismatch_probe.report.training.overview import events, run_headline


def render_outcome(summary: TrainingSummary, console: Console, label: str = "") -> None:
    """The page's headline after a label, why the run stopped, and each guard that fired."""
    soft_wrap = not console.is_terminal
    told = f"{label}: {run_headline(summary).striptags()}" if label else run_headline(summary).striptags()
    console.print(Text(plain(told), style="bold"), soft_wrap=soft_wrap)
    for sentence in events(summary):
        console.print(Text(plain(sentence)), soft_wrap=soft_wrap)
