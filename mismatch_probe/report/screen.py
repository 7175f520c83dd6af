"""Lines and tables on a screen: wrapped and ruled on a terminal, whole and plain where the output is none."""

from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.inert import plain

_UNBOUNDED: Final = 10_000


def print_line(console: Console, line: str, style: str = "") -> None:
    """`line` as it stands: brackets are no markup, and what a stranger wrote in it is inert."""
    console.print(Text(plain(line), style=style), soft_wrap=not console.is_terminal)


def screen_table(console: Console, *columns: str, **layout: Any) -> Table:
    return Table(*columns, box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, **layout)


def full_width(console: Console, table: Table) -> int:
    """Columns that the table takes where nothing has to be folded."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum


def print_table(console: Console, table: Table) -> None:
    if not console.is_terminal:
        table.width = full_width(console, table)
    console.print(table, crop=False, highlight=False)
