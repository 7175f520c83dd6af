"""The catalogue's faults of the training path."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.fault_lab import in_training
from benchmarks.fault_lab.bench import Bench, Injection, Make, at_strengths
from benchmarks.fault_lab.models import configs, rope, some_tokens
from benchmarks.fault_lab.recording import BenchRun
from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype


def training_faults(bench: Bench) -> Iterator[Injection]:
    """Every fault that the training side of this model can have."""
    yield from _of_inputs(bench)
    yield from _of_the_model(bench)
    yield from _of_formats(bench)


def _of_inputs(bench: Bench) -> Iterator[Injection]:
    tokens = some_tokens(bench.model, bench.checkpoint)
    yield from _fault(
        "temperature in the engine only",
        Code.TEMPERATURE,
        {f"T = {value:g}": scored(in_training.at_temperature, value) for value in (0.999, 0.99, 0.8, 1.3)},
        usual=("T = 0.8", "T = 1.3"),
    )
    yield from _fault(
        "text before the prompt",
        Code.PROMPT_PREFIX,
        {
            "another first token": scored(in_training.first_token, tokens.other),
            "its first token twice": scored(in_training.doubled),
            "BOS before it": scored(in_training.with_prefix, [tokens.start]),
            f"{len(tokens.text)} tokens of a template": scored(in_training.with_prefix, tokens.text),
        },
    )
    yield from at_strengths(
        "padding attended to",
        "training",
        (Code.PROMPT_PREFIX, Code.POSITIONS, Code.NOT_REPEATABLE),
        {f"{share:.0%} of it": scored(in_training.left_padded, tokens.other, share) for share in (0.25, 1)},
    )
    yield from at_strengths(
        "packing without boundaries",
        "training",
        (Code.PROMPT_PREFIX, Code.NOT_REPEATABLE),
        {"2 in a row": scored(in_training.packed, 2)},
    )
    yield from _fault("logits read late", Code.LABEL_OFFSET, {"1 token": scored(in_training.labels_off_by_one)})


def _of_the_model(bench: Bench) -> Iterator[Injection]:
    yield from _fault(
        "dropout active",
        Code.NOT_REPEATABLE,
        {f"p = {share:g}": scored(in_training.with_dropout, share) for share in (0.001, 0.01, 0.1)},
    )
    yield from _fault(
        "RoPE base",
        Code.POSITIONS,
        {f"x {by:g}": configured(rope_parameters=rope(bench.checkpoint, times=by)) for by in (1.01, 2, 50)},
        usual=("x 2", "x 50"),
    )
    yield from _fault(
        "RoPE scaling",
        Code.POSITIONS,
        {
            f"linear {by:g}": configured(rope_parameters=rope(bench.checkpoint, rope_type="linear", factor=by))
            for by in (1.05, 2.0)
        },
    )
    for fault, code, label, changes in configs(bench.model, bench.checkpoint):
        yield from _fault(fault, code, {label: configured(**changes)})
    yield from _fault(
        "other weights",
        Code.STALE_WEIGHTS,
        {f"{size:g} of each tensor": weighed(in_training.other_weights, size) for size in (1e-4, 1e-3, 1e-2, 1e-1)},
        usual=("0.001 of each tensor", "0.01 of each tensor"),
    )
    yield from _fault(
        "adapter merged on one side",
        Code.STALE_WEIGHTS,
        {f"{size:g} of q and v": weighed(in_training.unmerged_adapter, size) for size in (0.01, 0.1)},
    )
    yield from _fault(
        "embedding not synced",
        Code.STALE_WEIGHTS,
        {f"{size:g} of it": weighed(in_training.other_weights, size, "embed_tokens") for size in (1e-3, 1e-2)},
    )


def _of_formats(bench: Bench) -> Iterator[Injection]:
    yield from _fault(
        "buffers cast with the weights",
        Code.POSITIONS,
        {"model.to(bf16)": scored(in_training.with_settings, precision="to")},
    )
    yield from _fault(
        "log-softmax in 16 bit",
        Code.ONE_SIDED_DTYPE,
        {dtype: scored(in_training.with_settings, log_softmax_dtype=dtype) for dtype in ("fp16", "bf16")},
    )
    others = [dtype for dtype in (Dtype.FP16, Dtype.FP32) if dtype in bench.dtypes]
    yield from _fault(
        "another dtype than the run says",
        Code.ONE_SIDED_DTYPE,
        {f"{dtype} for bf16": scored(in_training.in_dtype, dtype) for dtype in others},
    )


def _fault(name: str, code: Code, strengths: dict[str, Make], usual: tuple[str, ...] = ()) -> Iterator[Injection]:
    return at_strengths(name, "training", (code,), strengths, usual)


def scored(open_with: Callable[..., Any], *args: Any, **kwargs: Any) -> Make:
    """The responses scored by what `open_with` makes of the checkpoint."""
    return partial(_scored, open_with=open_with, args=args, kwargs=kwargs)


def _scored(bench: Bench, open_with: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BenchRun:
    return bench.in_training(_name(open_with, args, kwargs), lambda: open_with(bench.checkpoint, *args, **kwargs))


def configured(**changes: Any) -> Make:
    """The training side reads a config with these changes."""
    return partial(_configured, changes=changes)


def _configured(bench: Bench, changes: dict[str, Any]) -> BenchRun:
    name = _name(configured, (), changes)
    return bench.in_training(
        name, lambda: in_training.with_other_config(bench.checkpoint, bench.edited(name), **changes)
    )


def weighed(change: Callable[..., Any], *args: Any) -> Make:
    """The training side holds changed weights."""
    return partial(_weighed, change=change, args=args)


def _weighed(bench: Bench, change: Callable[..., Any], args: tuple[Any, ...]) -> BenchRun:
    name = _name(change, args, {})
    return bench.in_training(name, lambda: in_training.on(change(bench.checkpoint, bench.edited(name), *args)))


def _name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A folder's name for a fault."""
    parts = [function.__name__, *map(str, args), *map(str, kwargs.values())]
    return "-".join("".join(letter for letter in part if letter.isalnum() or letter in "._") for part in parts)[:100]
