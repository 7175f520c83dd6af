"""The flags of every command that trains, each with the setting that it is."""

from pathlib import Path
from typing import Final

from mismatch_probe.cli.options import MODEL, REWARD_HELP, TASK_HELP, Flag

TRAINING: Final = {
    **MODEL,
    "task": Flag("task.source", TASK_HELP, default="sums:medium"),
    "num_problems": Flag(
        "task.num_problems", "Problems to train on; unless given, all of a file, 256 of a task that makes them.", int
    ),
    "reward": Flag("task.reward", REWARD_HELP),
    "objective": Flag(
        "objective.name", "reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation).", default="grpo"
    ),
    "train_dtype": Flag("train_dtype", "The training path computes in: bf16, fp16, fp32.", default="fp16"),
    "infer_dtype": Flag("infer_dtype", "The engine samples in: bf16, fp16, fp32.", default="fp16"),
    "steps": Flag("steps", "Train up to this step.", int, default="100"),
    "learning_rate": Flag("optimizer.learning_rate", "Highest learning rate of AdamW.", float, default="1e-6"),
    "prompts_per_step": Flag("rollout.prompts", "Problems sampled in one step.", int, default="32"),
    "samples_per_prompt": Flag("rollout.samples", "Responses sampled for each problem.", int, default="8"),
    "max_new_tokens": Flag("rollout.max_new_tokens", "Longest response, in tokens.", int, default="1024"),
    "temperature": Flag("rollout.temperature", "Sampling temperature, the same on both sides.", float, default="1"),
    "lora_rank": Flag("policy.lora.rank", "Train adapters of this rank instead of all weights.", int),
    "guards": Flag("guards", "Guard file; the built-in guards unless given.", Path),
    "checkpoint_every": Flag("checkpoint.every", "Steps between checkpoints.", int, default="50"),
    "report_to": Flag("report_to", "wandb, tensorboard, trackio (repeatable).", list[str]),
    "seed": Flag("seed", "Seed of problems, sampling and adapters.", int, default="0"),
}
