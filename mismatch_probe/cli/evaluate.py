"""`mismatch-probe evaluate`."""

from typing import Annotated

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.compare import pairs_of
from mismatch_probe.cli.options import Sets, settings_given


def evaluate(
    context: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    task: Annotated[options.Task, Sets("prompts.source")] = None,
    num_problems: Annotated[
        int | None,
        typer.Option(help="How many problems; 256, or all of a smaller source, unless given."),
        Sets("prompts.num_prompts"),
    ] = None,
    reward: Annotated[options.RewardName, Sets("evaluation.reward")] = None,
    dtype: options.BothDtypes = None,
    train_dtype: options.TrainDtypes = None,
    infer_dtype: options.InferDtypes = None,
    samples_per_prompt: Annotated[
        int | None,
        typer.Option(help="Responses sampled for each problem; 4 unless given."),
        Sets("sampling.samples_per_prompt"),
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Seed of problems and sampling."), Sets("sampling.seed")] = None,
    device: options.Device = None,
    sample_pi: Annotated[
        bool,
        typer.Option("--sample-pi", help="Also sample responses on the training path itself; slower."),
        Sets("evaluation.sample_pi"),
    ] = False,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Accuracy under the engine and under the training policy, per dtype: what deployment loses.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    flags = settings_given(evaluate, context, pairs=pairs_of(dtype, train_dtype, infer_dtype))
    from mismatch_probe.cli.evaluate_command import run_evaluate

    raise typer.Exit(int(run_evaluate(flags, config=config, out=out, resume=resume, json_output=json_output)))
