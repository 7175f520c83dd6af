"""The flags of every command that trains: declared once, with the setting that each one is."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.cli.compare import engine_arguments
from mismatch_probe.config.nested import nested

Model = Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings.")
]
Task = Annotated[str | None, typer.Option(help="Problems: `sums:SPLIT`, a .jsonl or .parquet file, hub:…")]
NumProblems = Annotated[
    int | None, typer.Option(help="Problems to train on; unless given, all of a file, 256 of a task that makes them.")
]
RewardName = Annotated[str | None, typer.Option(help="`math`, or `module:function`; default: the task's own.")]
Objective = Annotated[
    str | None, typer.Option(help="reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation).")
]
TrainDtype = Annotated[str | None, typer.Option(help="The training path computes in: bf16, fp16, fp32.")]
InferDtype = Annotated[str | None, typer.Option(help="The engine samples in: bf16, fp16, fp32.")]
Steps = Annotated[int | None, typer.Option(help="Train up to this step.")]
LearningRate = Annotated[float | None, typer.Option(help="Highest learning rate of AdamW.")]
PromptsPerStep = Annotated[int | None, typer.Option(help="Problems sampled in one step.")]
SamplesPerPrompt = Annotated[int | None, typer.Option(help="Responses sampled for each problem.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest response, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature, the same on both sides.")]
LoraRank = Annotated[int | None, typer.Option(help="Train adapters of this rank instead of all weights.")]
Guards = Annotated[Path | None, typer.Option(help="Guard file; default: the built-in guards.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints.")]
ReportTo = Annotated[list[str] | None, typer.Option(help="wandb, tensorboard, trackio (repeatable).")]
Seed = Annotated[int | None, typer.Option(help="Seed of problems, sampling and adapters.")]
Out = Annotated[Path | None, typer.Option(help="Run directory to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Config = Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

_SETTINGS: Final = {
    "model": "model.path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "task": "task.source",
    "num_problems": "task.num_problems",
    "reward": "task.reward",
    "objective": "objective.name",
    "train_dtype": "train_dtype",
    "infer_dtype": "infer_dtype",
    "steps": "steps",
    "learning_rate": "optimizer.learning_rate",
    "prompts_per_step": "rollout.prompts",
    "samples_per_prompt": "rollout.samples",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "lora_rank": "policy.lora.rank",
    "guards": "guards",
    "checkpoint_every": "checkpoint.every",
    "report_to": "report_to",
    "seed": "seed",
}


def training_flags(context: typer.Context) -> dict[str, Any]:
    """The settings that the command line gives, engine arguments included.

    Raises:
        UsageError: a word is neither a flag nor an engine argument.
    """
    given = {
        path: context.params[name]
        for name, path in _SETTINGS.items()
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    return nested({**given, "engine.args": engine_arguments(context.args) or None})
