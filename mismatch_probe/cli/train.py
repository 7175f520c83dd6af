"""`mismatch-probe train`."""

from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli import training_options as training
from mismatch_probe.cli.options import settings_given


def train(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: training.Task = None,
    num_problems: training.NumProblems = None,
    reward: training.RewardName = None,
    objective: training.Objective = None,
    train_dtype: training.TrainDtype = None,
    infer_dtype: training.InferDtype = None,
    steps: training.Steps = None,
    learning_rate: training.LearningRate = None,
    prompts_per_step: training.PromptsPerStep = None,
    samples_per_prompt: training.SamplesPerPrompt = None,
    max_new_tokens: training.MaxNewTokens = None,
    temperature: training.Temperature = None,
    lora_rank: training.LoraRank = None,
    guards: training.Guards = None,
    checkpoint_every: training.CheckpointEvery = None,
    report_to: training.ReportTo = None,
    seed: training.Seed = None,
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
    flags = settings_given(train, context)
    if canary:
        from mismatch_probe.cli.canary_command import run_canary

        raise typer.Exit(int(run_canary(flags, config=config, out=out, resume=resume, json_output=json_output)))
    from mismatch_probe.cli.train_command import run_train

    raise typer.Exit(int(run_train(flags, config=config, out=out, resume=resume, json_output=json_output)))
