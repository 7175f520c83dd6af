"""`mismatch-probe headroom`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Sets, settings_given


def headroom(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompts: options.Prompts = None,
    chat_template: options.ChatTemplate = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="How many prompts to use; 8 unless given."), Sets("prompts.num_prompts")
    ] = None,
    samples_per_prompt: options.SamplesPerPrompt = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature."), Sets("sampling.temperature")
    ] = None,
    seed: options.Seed = None,
    reward: Annotated[options.RewardName, Sets("reward")] = None,
    objective: Annotated[
        str | None, typer.Option(help="Whose gradient: grpo, dr-grpo, reinforce, gspo, …"), Sets("objective.name")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention of the FP16 runs: sdpa, eager, flash_attention_2; default: as `train`."),
        Sets("attention"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1."), Sets("device")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one forward pass, padding included."), Sets("batch_tokens")
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Scan the stored weights, of any size, and run nothing."),
        Sets("weights_only"),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write headroom.json and report.html into.")] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Say whether a checkpoint fits FP16: weights, activations, and the gradients of an RL loss.

    Ends with 0 where it fits, with a loss scale or with modules in FP32 if need be, and with 1 where it does not.
    """
    flags = settings_given(headroom, context)
    from mismatch_probe.cli.headroom_command import run_headroom

    raise typer.Exit(int(run_headroom(flags, config=config, out=out, run=run, json_output=json_output)))
