"""Log-probs of one side rounded to 16 bit: a log-softmax that ran in it, or a transport that stored it.

Rounded numbers lie on the format's grid: they are exact in it, every one, which numbers computed in FP32 are not.
"""

import numpy as np

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype
from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Reals
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

LEAST_TOKENS = 200
COARSEST_FIRST = sorted(SIXTEEN_BIT, key=lambda dtype: dtype.significand_bits)
"""A log-prob that is exact in BF16 is exact in FP16 too."""


def rounded_logprobs(disagreement: Disagreement) -> Cause | None:
    """The cause where the log-probs of exactly one side lie on the grid of a 16-bit format."""
    legs = {"training path": disagreement.pair.log_pi, "engine": disagreement.pair.log_mu}
    for dtype in COARSEST_FIRST:
        rounded = [side for side, leg in legs.items() if is_on_grid(leg, dtype)]
        if len(rounded) == 1:
            return Code.ONE_SIDED_DTYPE.cause(
                what=f"the {rounded[0]}'s log-probs are rounded to {dtype}",
                evidence=[
                    f"every log-prob of the {rounded[0]} is exact in {dtype}, the other side's are not",
                    f"mean d {write_number(float(disagreement.pair.diff.mean()))} nats",
                ],
                advice=["Compute log-softmax in FP32 on both sides, and keep log-probs in FP32 on the way."],
            )
    return None


def is_on_grid(log_probs: Reals, dtype: Dtype) -> bool:
    """Whether every log-prob is exact in a 16-bit format; False for too few to tell."""
    values = np.asarray(log_probs[log_probs != 0], dtype=np.float32)
    if values.size < LEAST_TOKENS:
        return False
    if dtype == Dtype.BF16:
        return bool((values.view(np.uint32) & 0xFFFF == 0).all())
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())
