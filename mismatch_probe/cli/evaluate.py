"""`mismatch-probe evaluate`."""

from typing import Annotated

import typer

from mismatch_probe.cli import training_options as options
from mismatch_probe.cli.compare import Dtypes, engine_arguments, pairs_of
from mismatch_probe.config.nested import nested


def evaluate(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: options.Task = None,
    num_problems: Annotated[
        int | None, typer.Option(help="How many problems; 256, or all of a smaller source, unless given.")
    ] = None,
    reward: options.RewardName = None,
    dtype: Annotated[Dtypes, typer.Option(help="Both sides in this dtype (repeatable): bf16, fp16, fp32.")] = None,
    train_dtype: Annotated[Dtypes, typer.Option(help="Training side (repeatable; crossed with --infer-dtype).")] = None,
    infer_dtype: Annotated[Dtypes, typer.Option(help="Inference side (repeatable).")] = None,
    samples_per_prompt: Annotated[
        int | None, typer.Option(help="Responses sampled for each problem; 4 unless given.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Seed of problems and sampling.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the training path: auto, cpu, cuda, cuda:1.")] = None,
    sample_pi: Annotated[
        bool, typer.Option("--sample-pi", help="Also sample responses on the training path itself; slower.")
    ] = False,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Accuracy under the engine and under the training policy, per dtype: what deployment loses.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    flags = nested(
        {
            "model.path": model,
            "model.revision": revision,
            "model.trust_remote_code": trust_remote_code or None,
            "prompts.source": task,
            "prompts.num_prompts": num_problems,
            "evaluation.reward": reward,
            "evaluation.sample_pi": sample_pi or None,
            "sampling.samples_per_prompt": samples_per_prompt,
            "sampling.max_new_tokens": max_new_tokens,
            "sampling.temperature": temperature,
            "sampling.seed": seed,
            "training.device": device,
            "engine.args": engine_arguments(context.args) or None,
            "pairs": pairs_of(dtype, train_dtype, infer_dtype),
        }
    )
    from mismatch_probe.cli.evaluate_command import run_evaluate

    raise typer.Exit(int(run_evaluate(flags, config=config, out=out, resume=resume, json_output=json_output)))
