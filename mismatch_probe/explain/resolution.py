"""What was rounded away as a column was written down: a 16-bit format, or few decimals."""

from typing import Final

import numpy as np

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype
from mismatch_probe.explain.tokens import Floats
from mismatch_probe.verdict.signatures.rounded_logprobs import is_on_grid

_MOST_DECIMALS: Final = 6


def grid_of(column: Floats) -> Dtype | None:
    """The 16-bit format, coarsest first, that every log-prob of the column is exact in."""
    coarsest_first = sorted(SIXTEEN_BIT, key=lambda dtype: dtype.significand_bits)
    return next((dtype for dtype in coarsest_first if is_on_grid(column, dtype)), None)


def resolution(known: Floats, column: Floats) -> Floats:
    """Root mean square of what writing a column down rounded away [T] (nats); `known` are the values that count."""
    grid = grid_of(known)
    if grid is not None:
        return np.asarray(np.abs(np.nan_to_num(column)) * grid.round_off / np.sqrt(3))
    for decimals in range(1, _MOST_DECIMALS):
        if len(known) and np.array_equal(np.round(known, decimals), known):
            return np.full_like(column, 10.0**-decimals / np.sqrt(12))
    return np.zeros_like(column)
