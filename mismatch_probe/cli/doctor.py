"""`mismatch-probe doctor`."""

from typing import Annotated

import typer

from mismatch_probe.errors import ExitCode


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also start both sides on this checkpoint and show what they really apply.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The dtype both sides are started in, with --model.")] = "bf16",
    infer: Annotated[
        str | None,
        typer.Option(help="With --model, an inference side in place of that dtype's: prod:url=http://HOST:PORT."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> ExitCode:
    """Check versions, devices, pin conflicts and imports; with --model, the effective settings of both sides."""
    from mismatch_probe.children.servers import warm_up
    from mismatch_probe.cli.output import print_json, results
    from mismatch_probe.compare.examination import examine
    from mismatch_probe.config.load import parse_side
    from mismatch_probe.errors import UsageError
    from mismatch_probe.report.screen import render_examination

    if infer is not None and model is None:
        raise UsageError("--infer says what is started beside the training path; give --model too")
    if model is not None:
        warm_up("training", "engine")
    examination = examine(model, dtype, None if infer is None else parse_side("infer", infer))
    render_examination(examination, results(as_json=json_output))
    if json_output:
        print_json(examination)
    return examination.exit_code
