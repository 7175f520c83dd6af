"""What `doctor` found, for people."""

import json

from rich.console import Console
from rich.table import Table

from mismatch_probe.records.examination import Examination


def render_examination(found: Examination, console: Console) -> None:
    """Print an examination: what is wrong last, where the eye stops."""
    table = Table("package", "version", title="Versions", title_justify="left")
    for name, version in found.versions.items():
        table.add_row(name, version)
    console.print(table)
    hardware = Table("hardware", "", title_justify="left")
    for name, value in found.hardware.items():
        hardware.add_row(name, "none" if value == [] else str(value))
    console.print(hardware)
    for stage, settings in found.effective_settings.items():
        effective = Table(stage, "effective", title_justify="left")
        for name, value in settings.items():
            effective.add_row(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        console.print(effective)
    for remark in found.remarks:
        console.print(f"note: {remark}", soft_wrap=True, markup=False, highlight=False)
    for conflict in found.conflicts:
        console.print(f"pin conflict: {conflict}", soft_wrap=True, markup=False, highlight=False)
    for package in found.imports:
        if not package.ok:
            console.print(f"cannot import {package.package}: {package.problem}", soft_wrap=True, markup=False)
    if not found.exit_code:
        console.print("No conflict found; torch, transformers and vllm import.")
