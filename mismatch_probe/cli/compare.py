"""`mismatch-probe compare`."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.children.servers import warm_up
from mismatch_probe.config.nested import nested
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

_ENGINE_PREFIX = "--vllm."

Dtypes = list[str] | None


def compare(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings.")
    ] = False,
    dtype: Annotated[Dtypes, typer.Option(help="Both sides in this dtype (repeatable): bf16, fp16, fp32.")] = None,
    train_dtype: Annotated[Dtypes, typer.Option(help="Training side (repeatable; crossed with --infer-dtype).")] = None,
    infer_dtype: Annotated[Dtypes, typer.Option(help="Inference side (repeatable).")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="`sums:SPLIT`, a .jsonl or .parquet file, or hub:OWNER/NAME.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="auto (text becomes a user message if there is a template), always, never.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="How many prompts to use; 64, or all of a smaller source, unless given.")
    ] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses sampled for each prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest response, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, the same on both sides.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and sampling.")] = None,
    train_precision: Annotated[
        str | None, typer.Option(help="How pi is brought to its dtype: weights, to, autocast, fsdp.")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="pi's attention: sdpa, eager, flash_attention_2.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the training path: auto, cpu, cuda, cuda:1.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")] = None,
    gate: Annotated[Path | None, typer.Option(help="Gate file: judge the run, and extend it while undecided.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Run directory the gate's max_regression compares with.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, do nothing.")] = False,
) -> None:
    """Sample with vLLM, score the same tokens on the training path and in FP32, and say what the mismatch is.

    Engine arguments pass through: --vllm.KEY VALUE, for instance --vllm.tensor_parallel_size 2.
    """
    flags = nested(
        {
            "model.path": model,
            "model.revision": revision,
            "model.trust_remote_code": trust_remote_code or None,
            "prompts.source": prompts,
            "prompts.chat_template": chat_template,
            "prompts.num_prompts": num_prompts,
            "sampling.samples_per_prompt": samples_per_prompt,
            "sampling.max_new_tokens": max_new_tokens,
            "sampling.temperature": temperature,
            "sampling.seed": seed,
            "training.precision": train_precision,
            "training.attention": attention,
            "training.device": device,
            "engine.args": engine_arguments(context.args) or None,
            "pairs": pairs_of(dtype, train_dtype, infer_dtype),
        }
    )
    warm_up()
    from mismatch_probe.cli.compare_command import run_compare

    code = run_compare(
        flags,
        config=config,
        out=out,
        resume=resume,
        json_output=json_output,
        dry_run=dry_run,
        gate=gate,
        baseline=baseline,
    )
    raise typer.Exit(int(code))


def engine_arguments(extra: list[str]) -> dict[str, str]:
    """`--vllm.KEY VALUE` and `--vllm.KEY=VALUE` pairs left over by the parser; a bare `--vllm.KEY` means true.

    Raises:
        UsageError: something else was left over, or an argument is given twice.
    """
    found: dict[str, str] = {}
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if not word.startswith(_ENGINE_PREFIX):
            raise UsageError(f"{word!r} is not an option here; engine arguments are written --vllm.KEY VALUE")
        key, separator, value = word.removeprefix(_ENGINE_PREFIX).partition("=")
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = key.replace("-", "_")
        if name in found:
            raise UsageError(f"{_ENGINE_PREFIX}{name} is given twice; give it once")
        found[name] = value
    return found


def pairs_of(dtypes: Dtypes, train: Dtypes, infer: Dtypes) -> list[tuple[Dtype, Dtype]] | None:
    """The pairs (train, infer) that the dtype flags ask for; None where none is given.

    Raises:
        UsageError: the flags contradict each other, one side is missing, or a name is none of a dtype.
    """
    both, trains, infers = ([Dtype.parse(one) for one in given or ()] for given in (dtypes, train, infer))
    if not trains and not infers:
        return [(one, one) for one in both] or None
    if both:
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    if not (trains and infers):
        raise UsageError(
            "--train-dtype and --infer-dtype go together; give both, or --dtype for the same on both sides"
        )
    return [(one, other) for one in trains for other in infers]
