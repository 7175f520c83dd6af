"""`mismatch-probe watch DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.errors import ExitCode


def watch(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a training run writes its log into.")],
    guards: Annotated[
        Path | None, typer.Option(help="TOML file of guards (docs/guards.md); the built-in guards unless given.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the log; recognised by its content unless given.")
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(min=0, help="End after so many seconds without a new step; 0: after what is there now."),
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Look for new steps every so many seconds.")] = 2.0,
    unjudged: Annotated[
        int, typer.Option(min=0, help="End after so many steps in a row that could not be judged; 0: go on.")
    ] = 3,
    unjudged_share: Annotated[
        float, typer.Option(min=0, max=1, help="At the end, so large a share of the steps may be unjudged.")
    ] = 0.1,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Follow the log of a run that goes on, and say at each step what the guards say.

    Ends with 1 where a guard asks to stop, and with 3 after --unjudged steps in a row that could not be judged. After
    --idle seconds without a new step: with 1 where guards asked for more than a warning, with 3 where no step or too
    few could be judged, with 4 where the numbers of one mean nothing, else with 0.
    """
    from mismatch_probe.cli.watch_command import run_watch
    from mismatch_probe.importing.watch_outcome import Patience

    patience = Patience(unjudged, unjudged_share)
    return run_watch(source, guards, format, idle=idle, every=every, patience=patience, json_output=json_output)
