"""The flags of every command that trains, each with the setting that it is."""

from pathlib import Path
from typing import Final

from mismatch_probe.cli.options import MODEL, REWARD_HELP, TASK_HELP, Flag

TRAINING: Final = {
    **MODEL,
    "task": Flag("task.source", TASK_HELP),
    "num_problems": Flag(
        "task.num_problems", "Problems to train on; unless given, all of a file, 256 of a task that makes them.", int
    ),
    "reward": Flag("task.reward", REWARD_HELP),
    "objective": Flag("objective.name", "reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation)."),
    "train_dtype": Flag("train_dtype", "The training path computes in: bf16, fp16, fp32."),
    "infer_dtype": Flag("infer_dtype", "The engine samples in: bf16, fp16, fp32."),
    "steps": Flag("steps", "Train up to this step.", int),
    "learning_rate": Flag("optimizer.learning_rate", "Highest learning rate of AdamW.", float),
    "prompts_per_step": Flag("rollout.prompts", "Problems sampled in one step.", int),
    "samples_per_prompt": Flag("rollout.samples", "Responses sampled for each problem.", int),
    "max_new_tokens": Flag("rollout.max_new_tokens", "Longest response, in tokens.", int),
    "temperature": Flag("rollout.temperature", "Sampling temperature, the same on both sides.", float),
    "lora_rank": Flag("policy.lora.rank", "Train adapters of this rank instead of all weights.", int),
    "guards": Flag("guards", "Guard file; default: the built-in guards.", Path),
    "checkpoint_every": Flag("checkpoint.every", "Steps between checkpoints.", int),
    "report_to": Flag("report_to", "wandb, tensorboard, trackio (repeatable).", list[str]),
    "seed": Flag("seed", "Seed of problems, sampling and adapters.", int),
}
