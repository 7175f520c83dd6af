"""`mismatch-probe sanity`."""

from typing import Annotated

import typer

from mismatch_probe.cli import training_options as options
from mismatch_probe.cli.training_options import training_flags
from mismatch_probe.config.nested import nested


def sanity(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: options.Task = None,
    candidates: Annotated[int | None, typer.Option(help="Most problems of the task to try; 256 unless given.")] = None,
    solve_samples: Annotated[
        int | None, typer.Option(help="Responses that a candidate is tried with; 40 unless given.")
    ] = None,
    keep_low: Annotated[float | None, typer.Option(help="Least solve rate of a kept one; 0.2 unless given.")] = None,
    keep_high: Annotated[float | None, typer.Option(help="Highest solve rate of a kept one; 0.8 unless given.")] = None,
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
    json_output: options.JsonOutput = False,
) -> None:
    """Keep the problems that the model solves now and then, train on them, and pass when it solves over 95 %.

    Exit code 0 when passed, 1 when not. Engine arguments pass through: --vllm.KEY VALUE.
    """
    own = {
        "sanity.candidates": candidates,
        "sanity.solve_samples": solve_samples,
        "sanity.keep_low": keep_low,
        "sanity.keep_high": keep_high,
    }
    flags = {**training_flags(context), **nested(own)}
    from mismatch_probe.cli.sanity_command import run_sanity

    raise typer.Exit(int(run_sanity(flags, config=config, out=out, resume=resume, json_output=json_output)))
