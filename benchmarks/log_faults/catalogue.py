"""The faults of a log: what was done to one side, and the causes that are a true account of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fault_lab import in_training
from benchmarks.fault_lab.models import SomeTokens, rope, some_tokens
from benchmarks.log_faults.bench import Bench, Columns, EditLog
from benchmarks.log_faults.designs import DESIGNS
from benchmarks.log_faults.stale_cache import behind_cache
from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence

Make = Callable[[Bench], Columns]


@dataclass(frozen=True)
class Fault:
    """`make` gives the faulty column; `given` is what the user tells of it besides the checkpoint.

    outside: it is none of the hypotheses, so that `unexplained` is right. is_drawn: each draw of it is another one.
    """

    name: str
    strength: str
    expected: tuple[str, ...]
    make: Make
    settings_given: Mapping[str, Any] = field(default_factory=dict)
    outside: bool = False
    is_drawn: bool = False


def faults(bench: Bench) -> Iterator[Fault]:
    yield from _sampling(bench)
    yield from _contexts(bench)
    yield from _weights(bench)
    yield from _lines()
    yield from _outside(bench)


def sides(number: int) -> LoggedSide:
    """Faults take turns on the two sides."""
    return "mu" if number % 2 else "pi"


def _sampling(bench: Bench) -> Iterator[Fault]:
    for value in (0.97, 0.9, 0.7, 1.3):
        yield _scored("temperature", f"{value:g}", Code.TEMPERATURE, in_training.at_temperature, value)
    for dtype in ("fp16", "bf16"):
        yield _scored(
            "log-softmax in 16 bit", dtype, Code.ONE_SIDED_DTYPE, in_training.with_settings, log_softmax_dtype=dtype
        )
    really = {Dtype.BF16: Dtype.FP32, Dtype.FP16: Dtype.BF16, Dtype.FP32: Dtype.BF16}[bench.dtype]
    yield Fault("another dtype", "than declared", (Code.ONE_SIDED_DTYPE,), partial(_in_dtype, really=really))


def _contexts(bench: Bench) -> Iterator[Fault]:
    tokens = _some_tokens(bench)
    yield _scored("first token", "twice", Code.PROMPT_PREFIX, in_training.doubled)
    yield _in_context("first token", "missing", Code.PROMPT_PREFIX, _without_first)
    if bench.model != "demo":
        yield _scored("BOS", "before it", Code.PROMPT_PREFIX, in_training.with_prefix, [tokens.start])
    yield _scored(
        "extra header",
        f"{len(tokens.text)} tokens, given",
        Code.PROMPT_PREFIX,
        in_training.with_prefix,
        tokens.text,
        settings_given={"headers": (tuple(tokens.text),)},
    )
    yield _in_context(
        "left padding attended to",
        "to the longest prompt",
        Code.POSITIONS,
        partial(_padded, pad=tokens.pad),
    )
    yield _in_context("packing without resets", "2 in a row", Code.PACKING, _packed)


def _weights(bench: Bench) -> Iterator[Fault]:
    for times in (4.0, 50.0):
        changes = {"rope_parameters": rope(bench.checkpoint, times=times)}
        yield Fault("RoPE base", f"x {times:g}", (Code.POSITIONS,), partial(_configured, changes=changes))
    changes = {"rope_parameters": rope(bench.checkpoint, rope_type="linear", factor=2.0)}
    yield Fault("RoPE scaling", "linear 2", (Code.POSITIONS,), partial(_configured, changes=changes))
    for size in (1e-3, 1e-2):
        folder = bench.scratch / "checkpoints" / f"{bench.model}-stale-{size:g}"
        yield Fault(
            "stale weights",
            f"{size:g}, given",
            (Code.STALE_WEIGHTS,),
            partial(_stale, folder=folder, size=size),
            {"weights": ({"version": "the step before", "checkpoint": str(folder)},)},
        )
    folder = bench.scratch / "checkpoints" / f"{bench.model}-cached"
    yield Fault(
        "prefix cache of older weights",
        "blocks of 16",
        (Code.STALE_WEIGHTS,),
        partial(_behind_cache, folder=folder),
        {"weights": ({"version": "the step before", "checkpoint": str(folder)},)},
    )
    for share in (0.01, 0.1):
        dropout = _scored("dropout", f"{share:g}", Code.NOT_REPEATABLE, in_training.with_dropout, share)
        yield replace(dropout, is_drawn=True)


def _lines() -> Iterator[Fault]:
    for share in (0.05, 0.3, 1.0):
        yield Fault(
            "responses exchanged", f"{share:.0%}", (Code.MISPAIRED,), partial(_of_pi, edit=_exchanged, share=share)
        )
    for by in (1, -1):
        yield Fault("labels shifted", f"{by:+d}", (Code.LABEL_OFFSET,), partial(_of_pi, edit=_shifted, by=by))
    for value in (0.0, -9999.0, float("nan")):
        yield Fault(
            "log-probs missing",
            f"{value:g} in 2 %",
            (Code.MISSING_LOGPROBS,),
            partial(_of_pi, edit=_spoiled, value=value, share=0.02),
        )


def _outside(bench: Bench) -> Iterator[Fault]:
    """Nothing in the list of hypotheses: other weights that nobody gives, a norm's constant, a header not given."""
    folder = bench.scratch / "checkpoints" / f"{bench.model}-unknown"
    yield Fault(
        "other weights", "0.05, not given", (Code.UNEXPLAINED,), partial(_stale, folder=folder, size=0.05), outside=True
    )
    yield Fault(
        "norm epsilon",
        "1e-1",
        (Code.UNEXPLAINED,),
        partial(_configured, changes={"rms_norm_eps": 1e-1}),
        outside=True,
    )
    header = _some_tokens(bench).text
    yield _scored("extra header", "not given", Code.UNEXPLAINED, in_training.with_prefix, header, outside=True)


def _some_tokens(bench: Bench) -> SomeTokens:
    """All tiny models have one tokenizer."""
    tiny = bench.model in DESIGNS and bench.model != "demo"
    return some_tokens("llama" if tiny else bench.model, bench.checkpoint)


def _scored(
    name: str,
    strength: str,
    code: str,
    open_with: Callable[..., Any],
    *args: Any,
    settings_given: Mapping[str, Any] | None = None,
    outside: bool = False,
    **kwargs: Any,
) -> Fault:
    def make(bench: Bench) -> Columns:
        return bench.scored(open_with(bench.checkpoint, *args, **kwargs))

    return Fault(name, strength, (code,), make, settings_given or {}, outside)


def _in_context(name: str, strength: str, code: str, edit: EditLog) -> Fault:
    def make(bench: Bench) -> Columns:
        return bench.scored(in_training.on(bench.checkpoint), edit)

    return Fault(name, strength, (code,), make)


def _without_first(log: list[TokenSequence]) -> list[TokenSequence]:
    return [replace(response, prompt_token_ids=response.prompt_token_ids[1:]) for response in log]


def _padded(log: list[TokenSequence], pad: int) -> list[TokenSequence]:
    longest = max(len(response.prompt_token_ids) for response in log)
    return [
        replace(
            response, prompt_token_ids=[pad] * (longest - len(response.prompt_token_ids)) + response.prompt_token_ids
        )
        for response in log
    ]


def _packed(log: list[TokenSequence]) -> list[TokenSequence]:
    """Every second response behind the one before it."""
    changed = list(log)
    for row in range(1, len(log), 2):
        before = log[row - 1]
        changed[row] = replace(
            log[row], prompt_token_ids=before.prompt_token_ids + before.token_ids + log[row].prompt_token_ids
        )
    return changed


def _in_dtype(bench: Bench, really: Dtype) -> Columns:
    return replace(bench, dtype=really).scored(in_training.on(bench.checkpoint), lambda _: bench.sequences)


def _configured(bench: Bench, changes: dict[str, Any]) -> Columns:
    target = bench.scratch / "checkpoints" / f"{bench.model}-configured"
    return bench.scored(in_training.with_other_config(bench.checkpoint, target, **changes))


def _stale(bench: Bench, folder: Path, size: float) -> Columns:
    return bench.scored(in_training.on(in_training.other_weights(bench.checkpoint, folder, size)))


def _behind_cache(bench: Bench, folder: Path) -> Columns:
    older = in_training.other_weights(bench.checkpoint, folder, 0.05)
    return behind_cache(older, bench.checkpoint, bench.sequences, 16, bench.arithmetic)


def _of_pi(bench: Bench, edit: Callable[..., Columns], **arguments: Any) -> Columns:
    return edit([column.copy() for column in bench.pi], **arguments)


def _exchanged(columns: Columns, share: float) -> Columns:
    random = np.random.default_rng(0)
    chosen = random.permutation(len(columns))[: max(2, round(share * len(columns)))]
    changed = list(columns)
    for row, donor in zip(chosen, np.roll(chosen, 1), strict=True):
        changed[row] = np.resize(columns[donor], len(columns[row]))
    return changed


def _shifted(columns: Columns, by: int) -> Columns:
    return [np.roll(column, by) for column in columns]


def _spoiled(columns: Columns, value: float, share: float) -> Columns:
    random = np.random.default_rng(0)
    for column in columns:
        column[random.random(len(column)) < share] = value
    return columns
