"""`mismatch-probe diff A B`."""

from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Run directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Run directory to set against it.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Set two runs side by side: what changed, and what it did to every metric, with intervals."""
    from mismatch_probe.cli.output import people, print_json
    from mismatch_probe.difference.console import render_difference
    from mismatch_probe.difference.runs import difference_of
    from mismatch_probe.records.run_directory import RunDirectory

    found = difference_of(RunDirectory(first), RunDirectory(second))
    render_difference(found, people())
    if json_output:
        print_json(found)
