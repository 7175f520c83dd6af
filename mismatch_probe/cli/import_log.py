"""`mismatch-probe import SOURCE`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.errors import ExitCode


def import_log(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A log: a file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="Run directory to make.")],
    format: Annotated[
        str | None, typer.Option(help="Format of the log; recognised by its content unless given.")
    ] = None,
    train_dtype: Annotated[
        str | None, typer.Option(help="Dtype that the trainer computed in: bf16, fp16, fp32.")
    ] = None,
    infer_dtype: Annotated[str | None, typer.Option(help="Dtype that the sampler computed in.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of both sides' log-probs, where the log does not say it.")
    ] = None,
    ref_is_fp32: Annotated[
        bool, typer.Option("--ref-is-fp32", help="The log's reference is the same policy in FP32, not another policy.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Analyse so many sampled tokens, of whole prompts chosen at random.")
    ] = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Make a run directory of a log that another system wrote: `report`, `gate` and `diff` read it.

    Nothing of the log is run. What it lacks, `score` computes on its token ids.
    """
    from mismatch_probe.cli.import_command import run_import

    return run_import(
        source,
        out,
        format,
        {
            "train_dtype": train_dtype,
            "infer_dtype": infer_dtype,
            "temperature": temperature,
            "ref_is_exact": ref_is_fp32,
            "most_tokens": max_tokens,
        },
        json_output=json_output,
    )
