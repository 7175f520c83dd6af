"""What `doctor` found, for people."""

import json
from typing import Any, Final

from rich.console import Console

from mismatch_probe.notation import write_size
from mismatch_probe.records.examination import Examination
from mismatch_probe.report.screen import print_line, print_table
from mismatch_probe.report.view import Cell, Table

_MEMORY: Final = "memory_bytes"


def render_examination(examination: Examination, console: Console) -> None:
    """Print an examination: what is wrong last, where the eye stops."""
    tables = {
        ("package", "version"): examination.versions,
        ("hardware", ""): dict(_written(name, value) for name, value in examination.hardware.items()),
        **{(stage, "effective"): settings for stage, settings in examination.effective_settings.items()},
    }
    for columns, values in tables.items():
        rows: list[list[Cell]] = [
            [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
            for name, value in values.items()
        ]
        print_table(console, Table("", columns, rows))
    for line in (
        *(f"note: {remark}" for remark in examination.remarks),
        *(f"pin conflict: {conflict}" for conflict in examination.conflicts),
        *(f"cannot import {package.package}: {package.problem}" for package in examination.imports if not package.ok),
    ):
        print_line(console, line)
    if not examination.exit_code:
        *first, last = [package.package for package in examination.imports]
        print_line(console, f"No conflict found; {', '.join(first)} and {last} import.")


def _written(name: str, value: Any) -> tuple[str, Any]:
    """A fact about the hardware, in words."""
    if name == _MEMORY:
        return "memory", write_size(value)
    return name.replace("_", " "), "none" if value == [] else value
