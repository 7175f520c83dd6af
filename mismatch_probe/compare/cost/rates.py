"""What forward passes compute, and how long a machine of measured rates takes for it."""

from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.architecture import Architecture, Lengths
from mismatch_probe.dtypes import Dtype

Process = Literal["engine", "training", "server"]


@dataclass(frozen=True)
class Work:
    """What is to be done, as sums: floating-point operations in products with weights and in attention, bytes read from
    memory that no product waits for, small operations that the host hands out one by one, and bytes read from disk.
    """

    matrix_flops: float = 0.0
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    operations: float = 0.0
    disk_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, astuple(self), astuple(other)))

    def times(self, factor: float) -> "Work":
        return Work(*(amount * factor for amount in astuple(self)))

    def per_rank(self, ranks: int) -> "Work":
        """What each of several ranks does: its part of the arithmetic, and every small operation."""
        return replace(self.times(1 / ranks), operations=self.operations)


class Rates(BaseModel):
    """What one side's device sustains in one dtype, measured on it; products include a layer's element-wise work."""

    model_config = ConfigDict(frozen=True)

    process: Process
    dtype: Dtype
    device: str
    matrix_flops_per_second: float
    attention_flops_per_second: float
    memory_bytes_per_second: float
    operation_seconds: float
    disk_bytes_per_second: float

    def seconds(self, work: Work) -> float:
        """One after the other: what overlaps on a device makes this an upper estimate."""
        return (
            work.matrix_flops / self.matrix_flops_per_second
            + work.attention_flops / self.attention_flops_per_second
            + work.memory_bytes / self.memory_bytes_per_second
            + work.operations * self.operation_seconds
            + work.disk_bytes / self.disk_bytes_per_second
        )


class Calibration(BaseModel):
    """What was measured of a machine, and the memory of each device: all of it, and what was free (of the host at
    least, which is `cpu`).
    """

    model_config = ConfigDict(frozen=True)

    rates: list[Rates]
    device_memory_bytes: dict[str, int]
    free_memory_bytes: dict[str, int]

    def has(self, process: Process, dtype: Dtype) -> bool:
        return any((rate.process, rate.dtype) == (process, dtype) for rate in self.rates)

    def rates_of(self, process: Process, dtype: Dtype) -> Rates:
        return next(rate for rate in self.rates if (rate.process, rate.dtype) == (process, dtype))


class Span(BaseModel):
    """A time that is not known exactly: the likely value, and between what it is expected."""

    model_config = ConfigDict(frozen=True)

    low_seconds: float
    likely_seconds: float
    high_seconds: float

    @classmethod
    def around(cls, seconds: float, factor: float) -> "Span":
        return cls(low_seconds=seconds / factor, likely_seconds=seconds, high_seconds=seconds * factor)

    def __add__(self, other: "Span") -> "Span":
        """Of both, one after the other; as if both erred in the same direction, which a slow machine has them do."""
        return Span(
            low_seconds=self.low_seconds + other.low_seconds,
            likely_seconds=self.likely_seconds + other.likely_seconds,
            high_seconds=self.high_seconds + other.high_seconds,
        )

    def less(self, seconds: float) -> "Span":
        """What is left of it after so long."""
        return Span(
            low_seconds=max(self.low_seconds - seconds, 0.0),
            likely_seconds=max(self.likely_seconds - seconds, 0.0),
            high_seconds=max(self.high_seconds - seconds, 0.0),
        )

    def __contains__(self, seconds: float) -> bool:
        return self.low_seconds <= seconds <= self.high_seconds


NO_TIME = Span(low_seconds=0, likely_seconds=0, high_seconds=0)


_STEP_OPERATIONS: Final = 1250
_STEP_LAYER_OPERATIONS: Final = 60
PASS_OPERATIONS: Final = 2000
_PASS_LAYER_OPERATIONS: Final = 150
_SAMPLED_TOKEN_OPERATIONS: Final = 40
_SCORED_TOKEN_OPERATIONS: Final = 5
NUMBER_OPERATIONS: Final = 0.15
"""What the host hands out or does in Python, counted in small operations: in an engine's step and in each of its
layers, in a pass over whole sequences and in each of its layers, for a token that an engine samples or scores, and for
a number of a whole distribution that it hands over. Counts that fit what `benchmarks/cost_model.py` measured; what one
takes is measured on each machine.
"""
_LOGIT_BYTES: Final = 16
"""Moved for one logit: computed, its log-softmax, its share of the entropy."""


def decoding(dtype: Dtype, architecture: Architecture, prompts: Lengths, each: float, steps: float) -> Work:
    """Prefill of the prompts, then in `steps` steps `each` tokens behind every one of them: in a step every weight is
    read once, and every sequence's keys and values.
    """
    itemsize, prompt_tokens, tokens = dtype.num_bytes, float(prompts.sum()), len(prompts) * each
    return Work(
        matrix_flops=architecture.matrix_flops(prompt_tokens + tokens, len(prompts) + tokens),
        attention_flops=architecture.attention_flops(prompts, causal=True),
        memory_bytes=steps * architecture.parameters * itemsize
        + architecture.kv_bytes((prompt_tokens + tokens / 2) * each, itemsize)
        + tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=steps * (_STEP_OPERATIONS + architecture.num_layers * _STEP_LAYER_OPERATIONS)
        + tokens * _SAMPLED_TOKEN_OPERATIONS,
    )


def scored_by_engine(architecture: Architecture, lengths: Lengths, steps: float) -> Work:
    """Prefill of whole sequences in so many steps of the engine."""
    work = Work(operations=float(lengths.sum()) * _SCORED_TOKEN_OPERATIONS)
    return whole_passes(architecture, lengths, steps) + work


def whole_passes(architecture: Architecture, lengths: Lengths, passes: float) -> Work:
    """Forward passes over whole sequences that give log-probs of every token."""
    tokens = float(lengths.sum())
    return Work(
        matrix_flops=architecture.matrix_flops(tokens, tokens),
        attention_flops=architecture.attention_flops(lengths, causal=True),
        memory_bytes=tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=passes * (PASS_OPERATIONS + architecture.num_layers * _PASS_LAYER_OPERATIONS),
    )
