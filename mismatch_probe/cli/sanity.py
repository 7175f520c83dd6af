"""`mismatch-probe sanity`."""

from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli import training_options as training
from mismatch_probe.cli.options import Sets, settings_given


def sanity(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: training.Task = None,
    candidates: Annotated[
        int | None, typer.Option(help="Most problems of the task to try; 256 unless given."), Sets("sanity.candidates")
    ] = None,
    solve_samples: Annotated[
        int | None,
        typer.Option(help="Responses that a candidate is tried with; 40 unless given."),
        Sets("sanity.solve_samples"),
    ] = None,
    keep_low: Annotated[
        float | None, typer.Option(help="Least solve rate of a kept one; 0.2 unless given."), Sets("sanity.keep_low")
    ] = None,
    keep_high: Annotated[
        float | None, typer.Option(help="Highest solve rate of a kept one; 0.8 unless given."), Sets("sanity.keep_high")
    ] = None,
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
    json_output: options.JsonOutput = False,
) -> None:
    """Keep the problems that the model solves now and then, train on them, and pass when it solves over 95 %.

    Exit code 0 when passed, 1 when not. Engine arguments pass through: --vllm.KEY VALUE.
    """
    flags = settings_given(sanity, context)
    from mismatch_probe.cli.sanity_command import run_sanity

    raise typer.Exit(int(run_sanity(flags, config=config, out=out, resume=resume, json_output=json_output)))
