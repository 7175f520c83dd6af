"""The story on one screen, with the same strings as the page; plain text where the output is not a terminal."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.notation import Written
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.advice import with_advice_to_follow
from mismatch_probe.report.names import SIGNS, pair_label, verdict_words
from mismatch_probe.report.pairs import COLUMNS, PairRow, budget_footnote, contrast_sentences, pair_row
from mismatch_probe.report.screen import full_width, print_line, screen_table

_STYLES = {"clean": "green", "precision": "yellow", "undecided": "blue", "bug": "bold red", "broken": "bold magenta"}


def render_terminal(summary: Summary, console: Console, run: Path) -> None:
    """Verdict, one row a pair of dtypes, what another dtype would change, and what to do about the run in `run`."""
    print_line(console, "")
    print_line(console, summary.headline, style="bold")
    print_line(console, "")
    console.print(_table(summary, console), crop=False)
    print_line(console, "")
    for sentence in contrast_sentences(summary):
        print_line(console, sentence)
    for line in (budget_footnote(summary), *_troubles(summary)):
        if line:
            print_line(console, line, style="dim")
    followable = with_advice_to_follow(summary, run, Findings(run).documents())
    for advice in dict.fromkeys(advice for pair in followable.pairs for advice in pair.verdict.advice):
        print_line(console, f"Advice: {advice}")


@dataclass(frozen=True)
class _Layout:
    """How much of a row stands beside each other."""

    break_before_interval: bool
    abs_diff_interval: bool

    def cells(self, row: PairRow) -> list[str]:
        abs_diff = row.abs_diff if self.abs_diff_interval else Written(row.abs_diff.value)
        numbers = [self._write(one) for one in (abs_diff, row.kl, row.budget)]
        return [*numbers, row.rms.replace(" / ", " /\n") if self.break_before_interval else row.rms]

    def _write(self, written: Written) -> str:
        return f"{written.value}\n{written.interval}".strip() if self.break_before_interval else str(written)


_LAYOUTS = (_Layout(False, True), _Layout(True, True), _Layout(True, False))


def _table(summary: Summary, console: Console) -> Table:
    """The widest layout that fits the terminal; the widest of all, at its full width, where there is none."""
    rows = [pair_row(pair) for pair in summary.pairs]
    for layout in _LAYOUTS:
        table = _build(rows, layout, console)
        width = full_width(console, table)
        if not console.is_terminal:
            table.width = width
            return table
        if width <= console.width:
            return table
    return table


def _build(rows: list[PairRow], layout: _Layout, console: Console) -> Table:
    table = screen_table(console, padding=(0, 1, 0, 0), header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        kind = row.verdict.kind
        verdict = Text(f"{SIGNS[kind]} {plain(verdict_words(row.verdict))}", style=_STYLES[kind])
        table.add_row(Text(row.label), verdict, *map(Text, layout.cells(row)))
    return table


def _troubles(summary: Summary) -> list[str]:
    """What was not usable, named per pair."""
    found = []
    for pair in summary.pairs:
        counts = pair.counts
        missing, nonfinite = counts.missing_mu + counts.missing_pi, counts.nonfinite_mu + counts.nonfinite_pi
        positive = counts.positive_mu + counts.positive_pi
        if counts.has_faults:
            found.append(
                f"{pair_label(pair)}: {missing:,} log-probs missing, {nonfinite:,} not finite, {positive:,} above 0, "
                f"{counts.void_checks:,} responses with void prefill or reference log-probs, "
                f"{counts.mismatched_ids:,} with other token ids; none of them is in the numbers above"
            )
    return found
