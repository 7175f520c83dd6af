"""The roofline: what forward passes compute and move, and how long a machine of measured rates takes for it."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from mismatch_probe.dtypes import Dtype

Lengths = npt.NDArray[np.float64]
"""Tokens of each sequence."""

ProcessName = Literal["engine", "training", "server"]


class UnknownArchitecture(Exception):  # noqa: N818 - an answer: there is no estimate
    """Why a checkpoint's forward pass could not be counted."""


@dataclass(frozen=True)
class Architecture:
    """A checkpoint's sizes, and what its forward pass computes by PyTorch's own count (`training_path.timing`)."""

    hidden_size: int
    intermediate_size: int
    """What a token passes through in a layer, of a mixture in all the experts that it is routed to."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    parameters: int
    layer_parameters: int
    """Of the largest layer."""
    outside_parameters: int
    """Of what no layer holds."""
    token_flops: float
    """For each token, whatever its context, without the head."""
    pair_flops: float
    """For each pair of tokens that attention multiplies, in all layers; twice what a causal kernel computes."""
    head_flops: float
    """For each token whose logits are computed."""
    window: int | None = None
    """How many tokens attention sees in the layers with a sliding window."""
    windowed_share: float = 0.0
    """The share of `pair_flops` in these layers."""

    def attention_flops(self, process: ProcessName, lengths: Lengths) -> float:
        """Of causal attention over whole sequences. An engine's kernels leave out what is behind a window; those of the
        training path compute every pair of a windowed layer and mask it.
        """
        causal = lengths**2 / 2
        return self.pair_flops * float(
            (1 - self.windowed_share) * causal.sum()
            + self.windowed_share * self._windowed_pairs(process, lengths).sum()
        )

    def cached_tokens(self, prompts: Lengths, each: float) -> float:
        """Keys that `each` steps of decoding after every prompt read, of all layers at the mean."""
        contexts = prompts + each / 2
        contexts_in_window = contexts if self.window is None else np.minimum(contexts, self.window)
        mean = (1 - self.windowed_share) * contexts + self.windowed_share * contexts_in_window
        return float(mean.sum()) * each

    def _windowed_pairs(self, process: ProcessName, lengths: Lengths) -> Lengths:
        if self.window is None:
            return lengths**2 / 2
        pairs_beyond = lengths**2 if process == "training" else self.window * (lengths - self.window / 2)
        return np.where(lengths > self.window, pairs_beyond, lengths**2 / 2)


@dataclass(frozen=True)
class Architectures:
    """Of every checkpoint of a run, by the path that its sides name."""

    counted: Mapping[str, Architecture]
    unknown: str = ""
    """Why one of them cannot be counted."""

    @classmethod
    def of_count(cls, names: Iterable[str], answer: Mapping[str, Any]) -> Self:
        """From the answer of `training_path.timing.count`, for the checkpoints in this order."""
        architectures = (Architecture(**sizes) for sizes in answer["architectures"])
        return cls(dict(zip(names, architectures, strict=False)), answer["unknown"])

    def all(self) -> Mapping[str, Architecture]:
        """
        Raises:
            UnknownArchitecture: one cannot be counted.
        """
        if self.unknown:
            raise UnknownArchitecture(self.unknown)
        return self.counted


@dataclass(frozen=True)
class Work:
    """What is to be done, as sums."""

    matrix_flops: float = 0.0
    """Floating-point operations in products with weights."""
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    """Read from memory while no product is computed."""
    operations: float = 0.0
    """Small operations that the host issues one by one: what small models spend nearly all their time on."""
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

    process: ProcessName
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
    """What was measured of a machine."""

    model_config = ConfigDict(frozen=True)

    rates: list[Rates]
    device_memory_bytes: dict[str, int]
    """All memory of each device."""
    free_memory_bytes: dict[str, int]
    """What of it was free; of the host (`cpu`) at least."""

    def has(self, process: ProcessName, dtype: Dtype) -> bool:
        return any((rate.process, rate.dtype) == (process, dtype) for rate in self.rates)

    def rates_of(self, process: ProcessName, dtype: Dtype) -> Rates:
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


PASS_OPERATIONS: Final = 2000
_PASS_LAYER_OPERATIONS: Final = 150
_STEP_OPERATIONS: Final = 1250
_STEP_LAYER_OPERATIONS: Final = 60
_SAMPLED_TOKEN_OPERATIONS: Final = 40
_SCORED_TOKEN_OPERATIONS: Final = 5
NUMBER_OPERATIONS: Final = 0.15
"""What the host issues or does in Python, counted in small operations: in a pass over whole sequences and
in each of its layers, in a step of decoding and in each of its layers, for a token that an engine samples or scores,
and for a number of a whole distribution that it returns. Counts that fit what `benchmarks/cost_model.py` measured; what
one takes is measured on each machine.
"""
_LOGIT_BYTES: Final = 16
"""Moved for one logit: computed, its log-softmax, its share of the entropy."""


def passes_over(process: ProcessName, architecture: Architecture, lengths: Lengths, passes: float) -> Work:
    """Forward passes over whole sequences that give log-probs of every token."""
    tokens = float(lengths.sum())
    return Work(
        matrix_flops=(architecture.token_flops + architecture.head_flops) * tokens,
        attention_flops=architecture.attention_flops(process, lengths),
        memory_bytes=tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=passes * (PASS_OPERATIONS + architecture.num_layers * _PASS_LAYER_OPERATIONS)
        + (0 if process == "training" else tokens * _SCORED_TOKEN_OPERATIONS),
    )


def decoding(dtype: Dtype, architecture: Architecture, prompts: Lengths, each: float, steps: float) -> Work:
    """Prefill of the prompts, then in `steps` steps `each` tokens after every one of them: in a step every weight is
    read once, and every sequence's keys and values.
    """
    prompt_tokens, tokens = float(prompts.sum()), len(prompts) * each
    cached_tokens = architecture.cached_tokens(prompts, each)
    cache_bytes = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * cached_tokens
    return Work(
        matrix_flops=architecture.token_flops * (prompt_tokens + tokens)
        + architecture.head_flops * (len(prompts) + tokens),
        attention_flops=architecture.attention_flops("engine", prompts),
        memory_bytes=(steps * architecture.parameters + cache_bytes) * dtype.num_bytes
        + tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=steps * (_STEP_OPERATIONS + architecture.num_layers * _STEP_LAYER_OPERATIONS)
        + tokens * _SAMPLED_TOKEN_OPERATIONS,
    )
