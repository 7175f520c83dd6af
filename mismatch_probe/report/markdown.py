"""Tables and text as Markdown, for a job summary or a comment; what a stranger wrote in them is inert."""

import re

from mismatch_probe.inert import plain
from mismatch_probe.report.screen import Write, in_full
from mismatch_probe.report.view import Cell, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$@&-]|:(?=//)|(?<=www)\.)", re.IGNORECASE)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no link, no mention, no markup, no table cell of its own."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def escaped_cell(cell: Cell) -> str:
    return escaped(in_full(cell))


def markdown_table(table: Table, write: Write = escaped_cell) -> list[str]:
    """A table of the page as lines of Markdown; `write` says how a cell is written."""
    rows = (table.columns, ["---"] * len(table.columns), *([write(cell) for cell in row] for row in table.rows))
    return [f"| {' | '.join(row)} |" for row in rows]
