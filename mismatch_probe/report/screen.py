"""An answer, tables and lines on a screen."""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Final

from markupsafe import Markup
from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from mismatch_probe.inert import lines_of_width, plain
from mismatch_probe.notation import WrittenNumber
from mismatch_probe.report.names import SIGNS, advice_parts
from mismatch_probe.report.view import Answer, Badge, Cell, Lines, Table, Terms

Write = Callable[[Cell], str]

_UNBOUNDED: Final = 10_000
_BETWEEN: Final = 2
"""Characters between two columns."""
_COLORS: Final = {
    "clean": "green",
    "precision": "cyan",
    "undecided": "blue",
    "growing": "yellow",
    "bug": "red",
    "broken": "magenta",
}
_GRAVE: Final = ("bug", "broken", "growing")


def print_answer(answer: Answer, console: Console) -> None:
    """The headline, what a screen has of the evidence, and what to do next.

    On a terminal a blank line stands before it, behind the progress; a pipe begins with the answer.
    """
    if console.is_terminal:
        print_line(console, "")
    if not answer.is_last:
        _print_headline(answer, console)
    for number, part in enumerate(answer.screen):
        if not (answer.is_last and number == 0) and (isinstance(part, Table) or not part.follows):
            print_line(console, "")
        _print_part(part, console)
    if answer.is_last:
        _print_headline(answer, console)
    advice = [*answer.advice, *answer.further_advice]
    if advice:
        print_line(console, "")
        print_advice(console, advice)


def _print_headline(answer: Answer, console: Console) -> None:
    print_line(console, in_full(answer.headline), f"bold {_COLORS[answer.badge.kind]}")
    if answer.command:
        print_command(console, answer.command)


def _print_part(part: Table | Lines | Terms, console: Console) -> None:
    if isinstance(part, Lines):
        for text in part.texts:
            print_line(console, text, part.style)
    elif isinstance(part, Terms):
        print_terms(console, part.items)
    else:
        if part.caption:
            print_line(console, part.caption, "bold")
        print_fitting(console, part)


def print_line(console: Console, line: str, style: str = "") -> None:
    """`line` as it stands: brackets are no markup, and what a stranger wrote in it is inert. On a terminal an indented
    line is indented throughout.
    """
    text = plain(line)
    if not console.is_terminal:
        console.print(Text(text, style=style), soft_wrap=True)
        return
    indent = len(text) - len(text.lstrip(" "))
    for part in lines_of_width(text[indent:], console.width - indent):
        console.print(Text(" " * indent + part, style=style), soft_wrap=True)


def print_terms(console: Console, items: Sequence[tuple[str, str]]) -> None:
    """Each behind its word or two, which stand in a column of their own."""
    grid = rich_table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, what in items:
        grid.add_row(Text(plain(name), "dim"), Text(plain(what)))
    show(console, grid)


def print_advice(console: Console, advice: Sequence[str]) -> None:
    """What to do next, each sentence once, with the commands that do it."""
    if advice:
        print_line(console, "Next", "dim")
    commands: dict[str, list[str]] = {}
    for what, command in map(advice_parts, dict.fromkeys(advice)):
        commands.setdefault(what, []).extend([command] if command else [])
    for what, doing_it in commands.items():
        print_line(console, f"  {what}:" if doing_it else f"  {what}")
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
    return cell.value if isinstance(cell, WrittenNumber) else in_full(cell)


def print_table(console: Console, table: Table, write: Write = in_full) -> None:
    show(console, draw_table(console, table, write))


def print_fitting(console: Console, table: Table) -> None:
    """In the widest layout that fits the terminal: titles on one line, or each word on its own; intervals behind
    numbers, or below them, or left out of the columns that can lack them.
    """
    narrow = replace(table, columns=[title.replace(" ", "\n") for title in table.columns])
    layouts = [_drawn_whole(console, each, write) for write in (in_full, _line_below) for each in (table, narrow)]
    fitting = next((layout for layout in layouts if full_width(console, layout) <= console.width), None)
    if not console.is_terminal:
        show(console, layouts[0])
    else:
        show(console, fitting or draw_table(console, _lacking(table, table.can_lack_interval), _line_below))


def _line_below(cell: Cell) -> str:
    """With a line's end before an interval, and between two numbers."""
    if isinstance(cell, WrittenNumber):
        return f"{cell.value}\n{cell.interval}".strip()
    return in_full(cell).replace(" / ", " /\n") if isinstance(cell, Markup) else in_full(cell)


def _lacking(table: Table, columns: Set[int]) -> Table:
    """Without the intervals of these columns."""
    rows = [
        [WrittenNumber(without_intervals(cell)) if number in columns else cell for number, cell in enumerate(row)]
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


def draw_table(console: Console, table: Table, write: Write = in_full) -> rich_table.Table:
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
        drawn_table.add_row(*(Text(write(cell), _badge_style(cell)) for cell in row))
    return drawn_table


def _badge_style(cell: Cell) -> str:
    if not isinstance(cell, Badge):
        return ""
    return f"{'bold ' if cell.kind in _GRAVE else ''}{_COLORS[cell.kind]}"


_WORD_ENDS: Final = re.compile(r"(?<!^.)(?<! to)[ \n](?!%)", re.MULTILINE)
"""A sign before a word, a percent sign behind a number, and a `to` and a bound, are parts of one word."""


def _keep_words(drawn_table: rich_table.Table, width: int) -> None:
    """Give the columns widths at which no word is broken, where there is room for that: each its longest word, and what
    is left to those that lack most.
    """
    columns = drawn_table.columns
    cells = [[str(column.header), *map(str, column.cells)] for column in columns]
    full = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    widths = [
        lines if column.no_wrap else max(len(word) for cell in own for word in _WORD_ENDS.split(cell))
        for column, own, lines in zip(columns, cells, full, strict=True)
    ]
    spare = width - sum(widths) - _BETWEEN * (len(columns) - 1)
    if spare < 0:
        return
    for _ in range(spare):
        lacks = [lines - column_width for lines, column_width in zip(full, widths, strict=True)]
        if max(lacks) > 0:
            widths[lacks.index(max(lacks))] += 1
    for column, column_width in zip(columns, widths, strict=True):
        column.width = column_width


def full_width(console: Console, table: rich_table.Table) -> int:
    """Columns that the table takes where nothing has to be folded."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum
