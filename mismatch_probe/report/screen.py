"""Lines and tables on a screen, a run's story on one, and what `doctor` found."""

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup
from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.notation import Written, write_many, write_size
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.summary import Examination, Summary
from mismatch_probe.report.names import SIGNS, pair_label
from mismatch_probe.report.pairs import (
    contrast_sentences,
    facts,
    few_tokens_sentences,
    left_out_sentences,
    pairs_table,
    settings_sentences,
    short_answer,
    table_footnote,
    tokens_left_out,
)
from mismatch_probe.report.tiles import parted, with_advice_to_follow
from mismatch_probe.report.view import Badge, Cell, Table
from mismatch_probe.verdict.headline import most_serious_first

Write = Callable[[Cell], str]

_UNBOUNDED: Final = 10_000
_BETWEEN: Final = 2
"""Characters between two columns."""
_STYLES: Final = {
    "clean": "green", "precision": "cyan", "undecided": "blue", "bug": "bold red", "broken": "bold magenta",
}  # fmt: skip


def print_line(console: Console, line: str, style: str = "") -> None:
    """`line` as it stands: brackets are no markup, and what a stranger wrote in it is inert."""
    console.print(Text(plain(line), style=style), soft_wrap=not console.is_terminal)


def print_blank_line(console: Console) -> None:
    """A line between progress and the answer on a terminal; a pipe begins with the answer."""
    if console.is_terminal:
        print_line(console, "")


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Each under its word or two, which stand in a column of their own."""
    grid = rich_table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, what in facts:
        grid.add_row(Text(plain(name), "dim"), Text(plain(what)))
    show(console, grid)


def print_advice(console: Console, advice: Sequence[str]) -> None:
    """What to do next, each sentence once, with the commands that do it."""
    if advice:
        print_line(console, "Next", "dim")
    commands: dict[str, list[str]] = {}
    for what, command in map(parted, dict.fromkeys(advice)):
        commands.setdefault(what, []).extend([command] if command else [])
    for what, doing_it in commands.items():
        text = Text(plain(f"{what}:" if doing_it else what))
        console.print(
            Padding(text, (0, 0, 0, 2)) if console.is_terminal else Text("  ") + text, soft_wrap=not console.is_terminal
        )
        for command in doing_it:
            print_command(console, command)


def print_command(console: Console, command: str) -> None:
    """A line of its own that is never broken, so that it can be copied."""
    console.print(Text(f"    {plain(command)}", "bold"), soft_wrap=True)


def in_full(cell: Cell) -> str:
    """A number with its interval, a judgement with its sign, HTML as its text; what a stranger wrote is inert."""
    if isinstance(cell, Badge):
        return f"{SIGNS[cell.kind]} {plain(cell.words)}"
    return plain(cell.striptags() if isinstance(cell, Markup) else str(cell))


def without_intervals(cell: Cell) -> str:
    return cell.value if isinstance(cell, Written) else in_full(cell)


def print_titled(console: Console, table: Table, write: Write = in_full) -> None:
    """A table under its caption."""
    print_line(console, "")
    print_line(console, table.caption, "bold")
    print_table(console, table, write)


def print_table(console: Console, table: Table, write: Write = in_full) -> None:
    show(console, drawn(console, table, write))


def print_fitting(console: Console, table: Table, *, can_lack: Set[int]) -> None:
    """In the widest layout that fits the terminal: intervals beside numbers, or below them, or left out of the columns
    `can_lack`.
    """
    layouts = [_drawn_whole(console, table, in_full), _drawn_whole(console, table, _below)]
    whole = next((layout for layout in layouts if full_width(console, layout) <= console.width), None)
    if not console.is_terminal:
        show(console, layouts[0])
    else:
        show(console, whole or drawn(console, _lacking(table, can_lack), _below))


def _below(cell: Cell) -> str:
    """With a line's end before an interval, and between two numbers."""
    if isinstance(cell, Written):
        return f"{cell.value}\n{cell.interval}".strip()
    return in_full(cell).replace(" / ", " /\n") if isinstance(cell, Markup) else in_full(cell)


def _lacking(table: Table, columns: Set[int]) -> Table:
    """Without the intervals of these columns."""
    rows = [
        [Written(without_intervals(cell)) if number in columns else cell for number, cell in enumerate(row)]
        for row in table.rows
    ]
    return replace(table, rows=rows)


def show(console: Console, table: rich_table.Table) -> None:
    """On a terminal as wide as it is; elsewhere each line as long as what stands on it."""
    if console.is_terminal:
        console.print(table, crop=False, highlight=False)
        return
    table.width = full_width(console, table)
    lines = console.render_lines(table, console.options.update(width=table.width), pad=False)
    for line in lines:
        console.print(Text("".join(segment.text for segment in line).rstrip()), soft_wrap=True)


def drawn(console: Console, table: Table, write: Write = in_full) -> rich_table.Table:
    """A table of the page as one of the terminal; `write` says how a cell is written."""
    drawn_table = _drawn_whole(console, table, write)
    if console.is_terminal and full_width(console, drawn_table) > console.width:
        _keep_words(drawn_table, console.width)
    return drawn_table


def _drawn_whole(console: Console, table: Table, write: Write) -> rich_table.Table:
    """With columns as wide as rich makes them."""
    box, between = (SIMPLE_HEAD, _BETWEEN - 1) if console.is_terminal else (None, _BETWEEN)
    drawn_table = rich_table.Table(*table.columns, box=box, pad_edge=False, show_edge=False, padding=(0, between, 0, 0))
    for column in drawn_table.columns:
        column.overflow = "fold"
    drawn_table.columns[0].no_wrap = not any(" " in in_full(row[0]) for row in table.rows)
    for row in table.rows:
        styles = (_STYLES[cell.kind] if isinstance(cell, Badge) else "" for cell in row)
        drawn_table.add_row(*(Text(write(cell), style) for cell, style in zip(row, styles, strict=True)))
    return drawn_table


def _keep_words(drawn_table: rich_table.Table, width: int) -> None:
    """Give the columns widths at which no word is broken, where there is room for that: each its longest word, and what
    is left to those that lack most.
    """
    columns = drawn_table.columns
    cells = [[str(column.header), *map(str, column.cells)] for column in columns]
    full = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    widths = [
        lines if column.no_wrap else max(len(word) for cell in own for word in re.split(r"[ \n](?!%)", cell))
        for column, own, lines in zip(columns, cells, full, strict=True)
    ]
    left = width - sum(widths) - _BETWEEN * (len(columns) - 1)
    if left < 0:
        return
    for _ in range(left):
        lacks = [lines - given for lines, given in zip(full, widths, strict=True)]
        if max(lacks) > 0:
            widths[lacks.index(max(lacks))] += 1
    for column, given in zip(columns, widths, strict=True):
        column.width = given


def full_width(console: Console, table: rich_table.Table) -> int:
    """Columns that the table takes where nothing has to be folded."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum


_MEMORY: Final = "memory_bytes"
_VALUE_COLUMNS: Final = 60


def render_examination(examination: Examination, console: Console) -> None:
    """Print an examination: what is wrong last, where the eye stops."""
    tables = {
        ("package", "version"): examination.versions,
        ("hardware", ""): dict(_written(name, value) for name, value in examination.hardware.items()),
    }
    for columns, values in tables.items():
        print_table(console, Table("", columns, _rows(values)))
    _print_effective(examination.effective_settings, console)
    for line in (
        *(f"note: {remark}" for remark in examination.remarks),
        *(f"pin conflict: {conflict}" for conflict in examination.conflicts),
        *(f"cannot import {package.package}: {package.problem}" for package in examination.imports if not package.ok),
    ):
        print_line(console, line)
    if not examination.exit_code:
        *first, last = [package.package for package in examination.imports]
        print_line(console, f"No conflict found; {', '.join(first)} and {last} import.")


def _print_effective(settings: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """In full for the first stage of each side's process; of the others what they have otherwise."""
    shown: dict[str, Mapping[str, Any]] = {}
    for stage, values in settings.items():
        like = next((name for name, others in shown.items() if others.keys() == values.keys()), None)
        if like is None:
            shown[stage] = values
            print_table(console, Table("", (stage, "effective"), _rows(values)))
            continue
        other = {name: value for name, value in values.items() if value != shown[like][name]}
        if other:
            print_table(console, Table("", (stage, f"other than in {like}"), _rows(other)))
        else:
            print_line(console, f"{stage}: as {like}")


def _rows(values: Mapping[str, Any]) -> list[list[Cell]]:
    """Names and values; a long value goes on in rows below, broken between words alone, so that a path stays one."""
    rows: list[list[Cell]] = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        first, *rest = textwrap.wrap(text, _VALUE_COLUMNS, break_long_words=False, break_on_hyphens=False) or [""]
        rows.append([name, first])
        rows.extend(["", line] for line in rest)
    return rows


def _written(name: str, value: Any) -> tuple[str, Any]:
    """A fact about the hardware, in words."""
    if name == _MEMORY:
        return "memory", write_size(value)
    return name.replace("_", " "), "none" if value == [] else value


def render_terminal(summary: Summary, console: Console, run: Path) -> None:
    """The answer, one row a pair, what another dtype would change, what it means, and what to do next with `run`."""
    filed = Findings(run).documents()
    print_blank_line(console)
    print_line(console, short_answer(summary), style="bold")
    print_line(console, "")
    print_fitting(console, pairs_table(summary), can_lack={2})
    for line in (table_footnote(summary), *left_out_sentences(summary), *_troubles(summary)):
        if line:
            print_line(console, line, style="dim")
    print_line(console, "")
    for sentence in (*contrast_sentences(summary), *settings_sentences(summary), *few_tokens_sentences(summary)):
        print_line(console, sentence)
    print_facts(console, facts(summary, filed))
    print_line(console, "")
    followable = with_advice_to_follow(summary, run, filed)
    print_advice(console, [advice for pair in most_serious_first(followable.pairs) for advice in pair.verdict.advice])


def _troubles(summary: Summary) -> list[str]:
    """What was not usable, named per pair."""
    troubles = []
    for pair in summary.pairs:
        counts = pair.counts
        missing, nonfinite = counts.missing_mu + counts.missing_pi, counts.nonfinite_mu + counts.nonfinite_pi
        positive = counts.positive_mu + counts.positive_pi
        if counts.has_faults:
            troubles.append(
                f"{pair_label(pair)}: {write_many(missing, 'log-prob')} missing, {nonfinite:,} not finite, "
                f"{positive:,} above 0, "
                f"{write_many(counts.void_checks, 'response')} with void prefill or reference log-probs, "
                f"{counts.mismatched_ids:,} with other token ids; none of them is in the numbers above"
                f"{tokens_left_out(counts)}"
            )
    return troubles
