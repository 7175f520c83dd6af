"""`mismatch-probe report RUN`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute statistics and verdict again from the recorded legs.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Render a run's report again from its files; needs neither engine nor accelerator."""
    from mismatch_probe.cli.output import people, print_json
    from mismatch_probe.compare.summarise import summarise
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.report import render_terminal, write_report

    directory = RunDirectory(run)
    if recompute:
        with directory.locked():
            directory.write_summary(summarise(directory, directory.read_manifest()))
    summary = directory.read_summary()
    console = people()
    path = write_report(directory)
    render_terminal(summary, console)
    console.print(f"Report: {path}", soft_wrap=True)
    if json_output:
        print_json(summary)
