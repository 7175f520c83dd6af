"""`mismatch-probe score RUN --model CHECKPOINT --out SCORED`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.options import gives_settings
from mismatch_probe.errors import ExitCode, UsageError


@gives_settings(options.MODEL, options.ATTENTION, options.DEVICE)
def score(
    given: dict[str, Any],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory that `import` made.")],
    out: Annotated[Path, typer.Option(help="Run directory to make, or to continue.")],
    step: Annotated[
        int | None, typer.Option(help="Score the responses of this step, whose weights --model has.")
    ] = None,
    train_dtype: Annotated[
        str | None, typer.Option(help="Dtype that the training path computes in; the log's unless given.")
    ] = None,
    infer_dtype: Annotated[
        str | None, typer.Option(help="Dtype that the engine computes in; the log's unless given.")
    ] = None,
    no_engine: Annotated[bool, typer.Option("--no-engine", help="The training path and the reference alone.")] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Compute what an imported log lacks, on its own token ids: the trainer's side, the engine's, the FP32 reference.

    Nothing is sampled. Engine arguments pass through: --vllm.KEY VALUE.
    """
    warm_up("training", *(() if no_engine else ("engine",)))
    from mismatch_probe.cli.output import narration, rescore_with_progress, show_run, with_dtypes
    from mismatch_probe.importing.scoring import ScoreRequest, open_scoring
    from mismatch_probe.records.run_directory import RunDirectory

    if "model" not in given:
        raise UsageError("no model to score with; give --model the checkpoint that sampled these responses")
    dtypes = with_dtypes({"train_dtype": train_dtype, "infer_dtype": infer_dtype})
    request = ScoreRequest(**dtypes, with_engine=not no_engine, step=step)
    scored = open_scoring(RunDirectory(run), out, request, given)
    rescore_with_progress(scored, narration())
    return show_run(scored, json_output=json_output)
