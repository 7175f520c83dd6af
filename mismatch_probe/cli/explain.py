"""`mismatch-probe explain RUN --model CHECKPOINT`."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode

_SAID: Final = {
    "train_dtype": Flag("pi.dtype", "Dtype that the trainer computed in."),
    "infer_dtype": Flag("mu.dtype", "Dtype that the sampler computed in."),
    "top_p": Flag(
        "mu.top_p",
        "The sampler's log-probs are said to be normalised over the most probable tokens with this share.",
        float,
    ),
    "top_k": Flag("mu.top_k", "As --top-p: over so many of the most probable tokens.", int),
    "min_p": Flag("mu.min_p", "As --top-p: over those with this share of the most probable one's probability.", float),
    "adapter": Flag("adapter", "LoRA adapter of both sides: a folder."),
    "device": Flag("device", "auto, cpu, cuda, cuda:1."),
}


@gives_settings(options.MODEL, _SAID)
def explain(
    given: dict[str, Any],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory that `import` made.")],
    step: Annotated[
        int | None, typer.Option(help="Explain the responses of this step, whose weights --model has.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Other weights to try, as VERSION=FOLDER (repeatable): a checkpoint or a LoRA adapter."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="To try before the prompts (repeatable): a text, or token ids as 1,2,3."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Both sides' log-probs are said to be at this temperature; what the import says unless given."
        ),
    ] = None,
    num_responses: Annotated[int | None, typer.Option(min=1, help="Look at so many responses; default 128.")] = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Name the cause of what a log shows: each suspected one is computed from the checkpoint and set against it."""
    warm_up("training")
    from mismatch_probe.cli.explain_command import run_explain_command

    return run_explain_command(
        run,
        given,
        step=step,
        weights=weights or [],
        headers=header or [],
        temperature=temperature,
        num_responses=num_responses,
        json_output=json_output,
    )
