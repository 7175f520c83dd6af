"""FP16's range [IEEE 754-2008, binary16]."""

import math
from typing import Final

from mismatch_probe.dtypes import Dtype

LARGEST: Final = Dtype.FP16.largest
ROUNDS_TO_INFINITY: Final = 65520.0
"""The smallest magnitude that rounds to infinity: half a unit in the last place above the largest."""
SMALLEST_NORMAL_EXPONENT: Final = -14
FLUSHED_EXPONENT: Final = -25
"""Magnitudes up to this power of two round to zero (ties to even): half of the smallest subnormal, 2^-24."""

LOSSY: Final = 2.0**-9
"""Half of BF16's unit roundoff, about its root mean square: what FP16 holds with a larger relative error is held better
by BF16.
"""


def margin_bits(largest: float) -> float | None:
    """log2(65504 / largest): how often a magnitude can double before it overflows; None for 0."""
    return math.log2(LARGEST / largest) if largest > 0 else None
