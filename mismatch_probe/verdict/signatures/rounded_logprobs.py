"""Log-probs of one side rounded to 16 bit: a log-softmax that ran in it, or a transport that stored it.

Rounded numbers lie on the format's grid: they are exact in it, but for a few that something wrote over. Of numbers
computed in FP32 one in thousands does. A side most of whose numbers are exact was rounded too, whatever the others are.
"""

import numpy as np

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype
from mismatch_probe.notation import write_number, write_percent, write_share
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Reals, TokenPair
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

LEAST_TOKENS = 200
LEAST_OF_ROUNDED = 0.99
MOST_OF_OTHER = 0.5
"""Shares of a side's log-probs that are exact in the format: of a rounded side, and of one that was not rounded."""
COARSEST_FIRST = sorted(SIXTEEN_BIT, key=lambda dtype: dtype.significand_bits)
"""A log-prob that is exact in BF16 is exact in FP16 too."""


def rounded_logprobs(disagreement: Disagreement) -> Cause | None:
    """The cause where nearly all log-probs of one side lie on the grid of a 16-bit format, and few of the other's."""
    pair = disagreement.pair
    legs = {"training path": pair.log_pi, "engine": pair.log_mu}
    for dtype in COARSEST_FIRST:
        shares = {side: grid_share(leg, dtype) for side, leg in legs.items()}
        (other, least), (rounded, most) = sorted(shares.items(), key=lambda one: one[1])
        if most >= LEAST_OF_ROUNDED and 0 <= least <= MOST_OF_OTHER:
            return Code.ONE_SIDED_DTYPE.cause(
                what=f"the {rounded}'s log-probs are rounded to {dtype}",
                evidence=[
                    f"{write_share(most, 1)} of the log-probs of the {rounded} are exact in {dtype}, and "
                    f"{write_share(least, 1)} of those of the {other}",
                    f"mean d {write_number(float(pair.diff.mean()))} nats",
                    f"writing them in {dtype} explains at most {write_percent(_explained(pair, legs[rounded], dtype))} "
                    f"of the sum of abs(d): the rest has another cause, or the log-softmax itself ran in {dtype}",
                ],
                advice=["Compute log-softmax in FP32 on both sides, and keep log-probs in FP32 on the way."],
            )
    return None


def _explained(pair: TokenPair, rounded: Reals, dtype: Dtype) -> float:
    """The share of the sum of abs(d) that half a step of the format makes at most."""
    total = float(pair.abs_diff.sum())
    return float(np.minimum(pair.abs_diff, dtype.round_off * np.abs(rounded)).sum()) / total if total else 1.0


def grid_share(log_probs: Reals, dtype: Dtype) -> float:
    """The share of the log-probs below 0 that are exact in a 16-bit format; -1 for too few to tell."""
    values = np.asarray(log_probs[log_probs != 0], dtype=np.float32)
    if values.size < LEAST_TOKENS:
        return -1.0
    if dtype == Dtype.BF16:
        return float((values.view(np.uint32) & 0xFFFF == 0).mean())
    with np.errstate(over="ignore"):
        return float((values.astype(np.float16).astype(np.float32) == values).mean())


def is_on_grid(log_probs: Reals, dtype: Dtype) -> bool:
    """Whether every log-prob is exact in a 16-bit format; False for too few to tell."""
    return grid_share(log_probs, dtype) == 1
