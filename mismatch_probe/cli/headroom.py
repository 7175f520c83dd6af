"""`mismatch-probe headroom`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.config.nested import nested


def headroom(
    model: Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings.")
    ] = False,
    prompts: Annotated[
        str | None, typer.Option(help="`sums:SPLIT`, a .jsonl or .parquet file, or hub:OWNER/NAME.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="auto (text becomes a user message if there is a template), always, never.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="How many prompts to use; 8 unless given.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses sampled for each prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest response, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and sampling.")] = None,
    reward: Annotated[str | None, typer.Option(help="`math`, or `module:function`; default: the task's own.")] = None,
    objective: Annotated[str | None, typer.Option(help="Whose gradient: grpo, dr-grpo, reinforce, gspo, …")] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention of the FP16 runs: sdpa, eager, flash_attention_2; default: as `train`."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of one forward pass, padding included.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Scan the stored weights, of any size, and run nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write headroom.json and report.html into.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run of `compare` to take the settings from and to file the result in.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Say whether a checkpoint fits FP16: weights, activations, and the gradients of an RL loss.

    Ends with 0 where it fits, with a loss scale or with modules in FP32 if need be, and with 1 where it does not.
    """
    flags = nested(
        {
            "model.path": model,
            "model.revision": revision,
            "model.trust_remote_code": trust_remote_code or None,
            "prompts.source": prompts,
            "prompts.chat_template": chat_template,
            "prompts.num_prompts": num_prompts,
            "sampling.samples_per_prompt": samples_per_prompt,
            "sampling.max_new_tokens": max_new_tokens,
            "sampling.temperature": temperature,
            "sampling.seed": seed,
            "reward": reward,
            "objective.name": objective,
            "attention": attention,
            "device": device,
            "batch_tokens": batch_tokens,
            "weights_only": weights_only or None,
        }
    )
    from mismatch_probe.cli.headroom_command import run_headroom

    raise typer.Exit(int(run_headroom(flags, config=config, out=out, run=run, json_output=json_output)))
