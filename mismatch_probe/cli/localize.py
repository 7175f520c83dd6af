"""`mismatch-probe localize`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli.compare import engine_arguments
from mismatch_probe.config.nested import nested
from mismatch_probe.errors import UsageError


def localize(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Both sides in this dtype: bf16, fp16, fp32.")] = None,
    train_dtype: Annotated[str | None, typer.Option(help="The training path computes in.")] = None,
    infer_dtype: Annotated[str | None, typer.Option(help="The engine computes in.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="`sums:SPLIT`, a .jsonl or .parquet file, or hub:OWNER/NAME.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="auto (text becomes a user message if there is a template), always, never.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="How many prompts to use; 16 unless given.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest response, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and sampling.")] = None,
    modules: Annotated[bool, typer.Option("--modules", help="Every module, not only every block.")] = False,
    no_interventions: Annotated[
        bool, typer.Option("--no-interventions", help="Only where errors enter, not what would mend them.")
    ] = False,
    switches: Annotated[
        bool,
        typer.Option(
            "--switches", help="Also restart the engine in other ways: compiled, chunked prefill; on CUDA more."
        ),
    ] = False,
    attention: Annotated[str | None, typer.Option(help="pi's attention: sdpa, eager, flash_attention_2.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the training path: auto, cpu, cuda, cuda:1.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write localize-TRAIN-INFER.json and report.html into.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run of `compare` to take the settings from and to file the result in.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Find the layer, and with --modules the operation, where vLLM and the training path part; and what would mend it.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    if dtype is not None and (train_dtype is not None or infer_dtype is not None):
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    flags = nested(
        {
            "model.path": model,
            "model.revision": revision,
            "model.trust_remote_code": trust_remote_code or None,
            "train_dtype": train_dtype or dtype,
            "infer_dtype": infer_dtype or dtype,
            "prompts.source": prompts,
            "prompts.chat_template": chat_template,
            "prompts.num_prompts": num_prompts,
            "sampling.max_new_tokens": max_new_tokens,
            "sampling.seed": seed,
            "modules": modules or None,
            "interventions": False if no_interventions else None,
            "switches": switches or None,
            "training.attention": attention,
            "training.device": device,
            "engine.args": engine_arguments(context.args) or None,
        }
    )
    warm_up()
    from mismatch_probe.cli.localize_command import run_localize

    raise typer.Exit(int(run_localize(flags, config=config, out=out, run=run, json_output=json_output)))
