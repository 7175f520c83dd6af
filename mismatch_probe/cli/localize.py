"""`mismatch-probe localize`."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.config.nested import nested
from mismatch_probe.errors import ExitCode, UsageError

_LOOK: Final = {
    "num_prompts": Flag("prompts.num_prompts", "How many prompts to use; 16 unless given.", int),
    "modules": Flag("modules", "Every module, not only every block.", bool),
    "no_interventions": Flag(
        "interventions", "Only where errors enter, not what would mend them.", bool, turns_off=True
    ),
    "switches": Flag(
        "switches", "Also restart the engine in other ways: compiled, chunked prefill; on CUDA more.", bool
    ),
}


@gives_settings(
    options.MODEL,
    options.PROMPTS,
    options.MAX_NEW_TOKENS,
    options.SEED,
    _LOOK,
    options.ATTENTION,
    options.DEVICE,
)
def localize(
    given: dict[str, Any],
    dtype: Annotated[
        str | None, typer.Option(help="Both sides in this dtype: bf16, fp16, fp32; bf16 unless given.")
    ] = None,
    train_dtype: Annotated[
        str | None, typer.Option(help="Dtype that the training path computes in; bf16 unless given.")
    ] = None,
    infer_dtype: Annotated[
        str | None, typer.Option(help="Dtype that the engine computes in; bf16 unless given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write localize-TRAIN-INFER.json and report.html into.")
    ] = None,
    run: options.Run = None,
    pair: Annotated[
        str | None, typer.Option(help="Two sides of --run by their names, with their own settings: TRAIN/INFER.")
    ] = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Find the layer, and with --modules the operation, where vLLM and the training path part; and what would mend it.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    if dtype is not None and (train_dtype is not None or infer_dtype is not None):
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    if pair is not None and (run is None or dtype or train_dtype or infer_dtype):
        raise UsageError("--pair names two sides of --run, which have their dtypes; give --run, and no dtype")
    flags = given | nested({"train_dtype": train_dtype or dtype, "infer_dtype": infer_dtype or dtype})
    warm_up("training", "engine")
    from mismatch_probe.cli.localize_command import run_localize

    return run_localize(flags, config=config, out=out, run=run, pair=pair, json_output=json_output)
