"""What a signature test looks at: the deviations of one pair and what rounding alone can do to them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Ints, TokenPair

ULP: dict[Dtype, float] = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of one rounding to nearest [IEEE 754-2019; bfloat16 has 8 bits of significand]."""

SIXTEEN_BIT: tuple[Dtype, ...] = ("fp16", "bf16")


@dataclass(frozen=True)
class Disagreement:
    """One pair, what was asked of it, and `floor`: the rms of d (nats) that rounding gives by what the run measured.

    `settled` tells that the pair is known to disagree by more than rounding, so that the causes which differ from
    rounding only in degree may be looked for; `formats_alone` that FP32 against FP32 agrees, so that only the formats
    are left to explain it. prompt_lengths: prompt tokens before each response [N]. has_experts: the checkpoint is a
    mixture of experts. probe: the same two sides on the first tokens of the prompts, where the start of the context is
    seen; None where it was not recorded.
    """

    pair: TokenPair
    train_dtype: Dtype
    infer_dtype: Dtype
    floor: float
    settled: bool = False
    formats_alone: bool = False
    prompt_lengths: Ints | None = None
    has_experts: bool = False
    probe: "Disagreement | None" = None

    @property
    def along(self) -> "Disagreement":
        """Where the deviation is best located in the context."""
        return self.probe or self

    @cached_property
    def rms(self) -> float:
        """Root mean square of d, nats."""
        return root_mean_square(self.pair.diff)

    @property
    def is_rounding(self) -> bool:
        """d is no larger than rounding can make it."""
        return self.rms <= 3 * self.floor

    @cached_property
    def places(self) -> Floats:
        """Tokens before each response token, from 1: the prompt's included where their number is known [T]."""
        places = self.pair.sequences.positions.astype(np.float64) + 1
        return places if self.prompt_lengths is None else places + self.pair.sequences.spread(self.prompt_lengths)

    @cached_property
    def rms_by_sequence(self) -> Floats:
        """Root mean square of d in each response [N]."""
        sequences = self.pair.sequences
        return np.sqrt(sequences.sum_by_sequence(self.pair.diff**2) / sequences.lengths)


def root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0
