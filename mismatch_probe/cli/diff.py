"""`mismatch-probe diff A B`."""

from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Run directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Run directory to set against it.")],
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="Score A's responses with B's settings first: the same tokens on both sides."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run directory that --rescore writes, or continues.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="HTML page to write: what changed, and both runs in figures.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="--rescore may run the code that B's settings name.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Set two runs side by side: what changed, and what it did to every metric, with intervals."""
    from mismatch_probe.cli.output import print_outcome, require_no_run_file, results
    from mismatch_probe.difference.runs import difference_of
    from mismatch_probe.errors import UsageError
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.report.answers.diff import difference_answer, write_difference
    from mismatch_probe.report.screen import print_answer

    old, new = RunDirectory(first), RunDirectory(second)
    if rescore != (out is not None):
        raise UsageError("--rescore and --out go together: the run that A's responses are scored into needs a place")
    if html is not None:
        require_no_run_file("--html", html)
    if out is None:
        difference = difference_of(old, new)
    else:
        from mismatch_probe.cli.output import rescored

        difference = difference_of(old, rescored(old, new, out, trust_remote_code=trust_remote_code), rescored_with=new)
    console = results(as_json=json_output)
    print_answer(difference_answer(difference), console)
    if html is not None:
        write_difference(difference, html)
    print_outcome(console, html, difference, as_json=json_output)
