"""`mismatch-probe train`."""

from typing import Annotated

import typer

from mismatch_probe.cli import training_options as options
from mismatch_probe.cli.training_options import training_flags


def train(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: options.Task = None,
    num_problems: options.NumProblems = None,
    reward: options.RewardName = None,
    objective: options.Objective = None,
    train_dtype: options.TrainDtype = None,
    infer_dtype: options.InferDtype = None,
    steps: options.Steps = None,
    learning_rate: options.LearningRate = None,
    prompts_per_step: options.PromptsPerStep = None,
    samples_per_prompt: options.SamplesPerPrompt = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    lora_rank: options.LoraRank = None,
    guards: options.Guards = None,
    checkpoint_every: options.CheckpointEvery = None,
    report_to: options.ReportTo = None,
    seed: options.Seed = None,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    canary: Annotated[
        bool,
        typer.Option("--canary", help="Train nothing: sync, sample and compare once, and say what guards think of it."),
    ] = False,
    json_output: options.JsonOutput = False,
) -> None:
    """Train with reinforcement learning, guarded by the mismatch between vLLM and the training path.

    Engine arguments pass through: --vllm.KEY VALUE. On several GPUs: torchrun --nproc-per-node N -m mismatch_probe
    train …
    """
    flags = training_flags(context)
    if canary:
        from mismatch_probe.cli.canary_command import run_canary

        raise typer.Exit(int(run_canary(flags, config=config, out=out, resume=resume, json_output=json_output)))
    from mismatch_probe.cli.train_command import run_train

    raise typer.Exit(int(run_train(flags, config=config, out=out, resume=resume, json_output=json_output)))
