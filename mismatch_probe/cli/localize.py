"""`mismatch-probe localize`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.options import Sets, settings_given
from mismatch_probe.errors import UsageError


def localize(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dtype: Annotated[str | None, typer.Option(help="Both sides in this dtype: bf16, fp16, fp32.")] = None,
    train_dtype: Annotated[str | None, typer.Option(help="The training path computes in.")] = None,
    infer_dtype: Annotated[str | None, typer.Option(help="The engine computes in.")] = None,
    prompts: options.Prompts = None,
    chat_template: options.ChatTemplate = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="How many prompts to use; 16 unless given."), Sets("prompts.num_prompts")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    seed: options.Seed = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="Every module, not only every block."), Sets("modules")
    ] = False,
    no_interventions: Annotated[
        bool,
        typer.Option("--no-interventions", help="Only where errors enter, not what would mend them."),
        Sets("interventions", turns_off=True),
    ] = False,
    switches: Annotated[
        bool,
        typer.Option(
            "--switches", help="Also restart the engine in other ways: compiled, chunked prefill; on CUDA more."
        ),
        Sets("switches"),
    ] = False,
    attention: options.Attention = None,
    device: options.Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write localize-TRAIN-INFER.json and report.html into.")
    ] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Find the layer, and with --modules the operation, where vLLM and the training path part; and what would mend it.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    if dtype is not None and (train_dtype is not None or infer_dtype is not None):
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    dtypes = {"train_dtype": train_dtype or dtype, "infer_dtype": infer_dtype or dtype}
    flags = settings_given(localize, context, **dtypes)
    warm_up()
    from mismatch_probe.cli.localize_command import run_localize

    raise typer.Exit(int(run_localize(flags, config=config, out=out, run=run, json_output=json_output)))
