"""The flags of every command that trains: declared once, with the setting that each one is."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Sets

Task = Annotated[options.Task, Sets("task.source")]
NumProblems = Annotated[
    int | None,
    typer.Option(help="Problems to train on; unless given, all of a file, 256 of a task that makes them."),
    Sets("task.num_problems"),
]
RewardName = Annotated[options.RewardName, Sets("task.reward")]
Objective = Annotated[
    str | None,
    typer.Option(help="reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation)."),
    Sets("objective.name"),
]
TrainDtype = Annotated[
    str | None, typer.Option(help="The training path computes in: bf16, fp16, fp32."), Sets("train_dtype")
]
InferDtype = Annotated[str | None, typer.Option(help="The engine samples in: bf16, fp16, fp32."), Sets("infer_dtype")]
Steps = Annotated[int | None, typer.Option(help="Train up to this step."), Sets("steps")]
LearningRate = Annotated[
    float | None, typer.Option(help="Highest learning rate of AdamW."), Sets("optimizer.learning_rate")
]
PromptsPerStep = Annotated[int | None, typer.Option(help="Problems sampled in one step."), Sets("rollout.prompts")]
SamplesPerPrompt = Annotated[
    int | None, typer.Option(help="Responses sampled for each problem."), Sets("rollout.samples")
]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest response, in tokens."), Sets("rollout.max_new_tokens")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature, the same on both sides."), Sets("rollout.temperature")
]
LoraRank = Annotated[
    int | None, typer.Option(help="Train adapters of this rank instead of all weights."), Sets("policy.lora.rank")
]
Guards = Annotated[Path | None, typer.Option(help="Guard file; default: the built-in guards."), Sets("guards")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints."), Sets("checkpoint.every")]
ReportTo = Annotated[
    list[str] | None, typer.Option(help="wandb, tensorboard, trackio (repeatable)."), Sets("report_to")
]
Seed = Annotated[int | None, typer.Option(help="Seed of problems, sampling and adapters."), Sets("seed")]
