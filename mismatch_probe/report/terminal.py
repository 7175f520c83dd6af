"""The story on one screen, with the same strings as the page; plain text where the output is not a terminal."""

from dataclasses import replace
from pathlib import Path

from markupsafe import Markup
from rich import table as rich_table
from rich.console import Console

from mismatch_probe.notation import Written
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.advice import with_advice_to_follow
from mismatch_probe.report.answer import facts, short_answer
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.pairs import budget_footnote, contrast_sentences, pairs_table, settings_sentences
from mismatch_probe.report.screen import (
    drawn,
    full_width,
    in_full,
    print_advice,
    print_facts,
    print_line,
    show,
    without_intervals,
)
from mismatch_probe.report.view import Cell, Table


def render_terminal(summary: Summary, console: Console, run: Path) -> None:
    """The answer, one row a pair, what another dtype would change, what it means, and what to do next with `run`."""
    filed = Findings(run).documents()
    print_line(console, "")
    print_line(console, short_answer(summary), style="bold")
    print_line(console, "")
    show(console, _fitted(pairs_table(summary), console))
    for line in (budget_footnote(summary), *_troubles(summary)):
        if line:
            print_line(console, line, style="dim")
    print_line(console, "")
    for sentence in (*contrast_sentences(summary), *settings_sentences(summary)):
        print_line(console, sentence)
    print_facts(console, facts(summary, filed))
    print_line(console, "")
    followable = with_advice_to_follow(summary, run, filed)
    print_advice(console, [advice for pair in followable.pairs for advice in pair.verdict.advice])


def _broken(cell: Cell) -> str:
    """With a line's end before an interval, and between two numbers."""
    if isinstance(cell, Written):
        return f"{cell.value}\n{cell.interval}".strip()
    return in_full(cell).replace(" / ", " /\n") if isinstance(cell, Markup) else in_full(cell)


def _fitted(table: Table, console: Console) -> rich_table.Table:
    """The widest layout that fits the terminal: intervals beside numbers, below them, or the first one left out."""
    shorter = replace(table, rows=[[*row[:2], Written(without_intervals(row[2])), *row[3:]] for row in table.rows])
    for layout, write in ((table, in_full), (table, _broken), (shorter, _broken)):
        fitted = drawn(console, layout, write, header_style="bold")
        if not console.is_terminal or full_width(console, fitted) <= console.width:
            break
    return fitted


def _troubles(summary: Summary) -> list[str]:
    """What was not usable, named per pair."""
    troubles = []
    for pair in summary.pairs:
        counts = pair.counts
        missing, nonfinite = counts.missing_mu + counts.missing_pi, counts.nonfinite_mu + counts.nonfinite_pi
        positive = counts.positive_mu + counts.positive_pi
        if counts.has_faults:
            troubles.append(
                f"{pair_label(pair)}: {missing:,} log-probs missing, {nonfinite:,} not finite, {positive:,} above 0, "
                f"{counts.void_checks:,} responses with void prefill or reference log-probs, "
                f"{counts.mismatched_ids:,} with other token ids; none of them is in the numbers above"
            )
    return troubles
