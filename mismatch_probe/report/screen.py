"""Lines and tables on a screen: wrapped and ruled on a terminal, whole and plain where the output is none."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from markupsafe import Markup
from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.notation import Written
from mismatch_probe.report.names import SIGNS
from mismatch_probe.report.view import Badge, Cell, Table

Write = Callable[[Cell], str]

_UNBOUNDED: Final = 10_000
_STYLES: Final = {
    "clean": "green", "precision": "cyan", "undecided": "blue", "bug": "bold red", "broken": "bold magenta",
}  # fmt: skip


def print_line(console: Console, line: str, style: str = "") -> None:
    """`line` as it stands: brackets are no markup, and what a stranger wrote in it is inert."""
    console.print(Text(plain(line), style=style), soft_wrap=not console.is_terminal)


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Each under its word or two, which stand in a column of their own."""
    grid = rich_table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, what in facts:
        grid.add_row(Text(plain(name), "dim"), Text(plain(what)))
    show(console, grid)


def print_advice(console: Console, advice: Sequence[str]) -> None:
    """What to do next. A command stands in a line of its own that is never broken, so that it can be copied."""
    if advice:
        print_line(console, "Next", "dim")
    for sentence in dict.fromkeys(advice):
        what, _, command = sentence.partition(": `")
        is_command = command.endswith("`")
        text = Text(plain(f"{what}:" if is_command else sentence))
        console.print(
            Padding(text, (0, 0, 0, 2)) if console.is_terminal else Text("  ") + text, soft_wrap=not console.is_terminal
        )
        if is_command:
            console.print(Text(f"    {plain(command.removesuffix('`'))}", "bold"), soft_wrap=True)


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


def show(console: Console, table: rich_table.Table) -> None:
    if not console.is_terminal:
        table.width = full_width(console, table)
    console.print(table, crop=False, highlight=False)


def drawn(console: Console, table: Table, write: Write = in_full, **layout: Any) -> rich_table.Table:
    """A table of the page as one of the terminal; `write` says how a cell is written."""
    box, between = (SIMPLE_HEAD, 1) if console.is_terminal else (None, 2)
    drawn_table = rich_table.Table(
        *table.columns, box=box, pad_edge=False, show_edge=False, padding=(0, between, 0, 0), **layout
    )
    for column, header in zip(drawn_table.columns, table.columns, strict=True):
        column.overflow = "fold"
        column.min_width = max(map(len, header.split()), default=0)
    drawn_table.columns[0].no_wrap = not any(" " in in_full(row[0]) for row in table.rows)
    for row in table.rows:
        styles = (_STYLES[cell.kind] if isinstance(cell, Badge) else "" for cell in row)
        drawn_table.add_row(*(Text(write(cell), style) for cell, style in zip(row, styles, strict=True)))
    if console.measure(drawn_table).minimum + len(table.columns) > console.width:
        for column in drawn_table.columns:  # rich gives such columns up to one more than there is
            column.min_width = None
    return drawn_table


def full_width(console: Console, table: rich_table.Table) -> int:
    """Columns that the table takes where nothing has to be folded."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum
