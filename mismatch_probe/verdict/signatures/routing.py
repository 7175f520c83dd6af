"""Flips of expert routing: rounding turns a near tie between experts, and another expert computes the token.

Few tokens carry most of the squared deviation, only in mixtures of experts, and it vanishes in FP32.
"""

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

TAIL = 0.01
HEAVY = 0.3
"""Share of the sum of d^2 in the largest hundredth of tokens; 0.08 for a Gaussian."""


def routing(disagreement: Disagreement) -> Cause | None:
    """The cause for a mixture of experts whose deviation lies in a heavy tail."""
    if not disagreement.has_experts:
        return None
    squares = np.sort(disagreement.pair.diff**2)[::-1]
    total = float(squares.sum())
    share = float(squares[: max(1, round(TAIL * squares.size))].sum()) / total if total else 0.0
    if share < HEAVY:
        return None
    return Code.ROUTING.cause(
        what=f"{write_percent(share)} of the squared deviation lies in 1 % of the tokens, as flips of experts make it",
        evidence=[
            "the checkpoint is a mixture of experts, whose choice of experts is sensitive to rounding",
            f"median abs(d) {write_number(float(np.median(disagreement.pair.abs_diff)))}, largest "
            f"{write_number(float(disagreement.pair.abs_diff.max()))} nats",
        ],
        advice=["Keep the router in FP32 on both sides, or replay the engine's expert choices while training."],
    )
