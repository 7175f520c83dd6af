"""`mismatch-probe explain RUN --model CHECKPOINT`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.options import Sets, settings_given


def explain(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory that `import` made.")],
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    step: Annotated[
        int | None, typer.Option(help="Explain the responses of this step, whose weights MODEL has.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Other weights to try, as VERSION=FOLDER (repeatable): a checkpoint or a LoRA adapter."),
    ] = None,
    train_dtype: Annotated[str | None, typer.Option(help="The trainer computed in."), Sets("pi.dtype")] = None,
    infer_dtype: Annotated[str | None, typer.Option(help="The sampler computed in."), Sets("mu.dtype")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Both sides are said to be at; default: what the import says.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="The sampler's log-probs are said to be normalised over."), Sets("mu.top_p")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="As --top-p, of the best so many."), Sets("mu.top_k")] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter of both sides: a folder."), Sets("adapter")] = None,
    num_responses: Annotated[int | None, typer.Option(min=1, help="Look at so many responses; default 128.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1."), Sets("device")] = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Name the cause of what a log shows: each suspected one is computed from the checkpoint and set against it."""
    flags = settings_given(explain, context)
    warm_up()
    from mismatch_probe.cli.explain_command import run_explain_command

    code = run_explain_command(
        run,
        flags,
        step=step,
        weights=weights or [],
        temperature=temperature,
        num_responses=num_responses,
        json_output=json_output,
    )
    raise typer.Exit(int(code))
