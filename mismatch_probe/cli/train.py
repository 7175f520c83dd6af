"""`mismatch-probe train`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli.compare import engine_arguments
from mismatch_probe.cli.flags import nested


def train(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings.")
    ] = False,
    task: Annotated[str | None, typer.Option(help="Problems: `sums:SPLIT`, a .jsonl or .parquet file, hub:…")] = None,
    num_problems: Annotated[int | None, typer.Option(help="How many problems of the task to train on.")] = None,
    reward: Annotated[str | None, typer.Option(help="`math`, or `module:function`; default: the task's own.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation).")
    ] = None,
    train_dtype: Annotated[str | None, typer.Option(help="The training path computes in: bf16, fp16, fp32.")] = None,
    infer_dtype: Annotated[str | None, typer.Option(help="The engine samples in: bf16, fp16, fp32.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train up to this step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate of AdamW.")] = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Problems sampled in one step.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses sampled for each problem.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest response, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, the same on both sides.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train adapters of this rank instead of all weights.")] = None,
    guards: Annotated[Path | None, typer.Option(help="Guard file; default: the built-in guards.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    report_to: Annotated[list[str] | None, typer.Option(help="wandb, tensorboard, trackio (repeatable).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of problems, sampling and adapters.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train with reinforcement learning, guarded by the mismatch between vLLM and the training path.

    Engine arguments pass through: --vllm.KEY VALUE. On several GPUs: torchrun --nproc-per-node N -m mismatch_probe
    train …
    """
    flags = nested(
        {
            "model.path": model,
            "model.revision": revision,
            "model.trust_remote_code": trust_remote_code or None,
            "task.source": task,
            "task.num_problems": num_problems,
            "task.reward": reward,
            "objective.name": objective,
            "train_dtype": train_dtype,
            "infer_dtype": infer_dtype,
            "steps": steps,
            "optimizer.learning_rate": learning_rate,
            "rollout.prompts": prompts_per_step,
            "rollout.samples": samples_per_prompt,
            "rollout.max_new_tokens": max_new_tokens,
            "rollout.temperature": temperature,
            "policy.lora.rank": lora_rank,
            "guards": guards,
            "checkpoint.every": checkpoint_every,
            "report_to": report_to,
            "seed": seed,
            "engine.args": engine_arguments(context.args) or None,
        }
    )
    from mismatch_probe.cli.train_command import run_train

    raise typer.Exit(int(run_train(flags, config=config, out=out, resume=resume, json_output=json_output)))
