"""Flips of expert routing: rounding turns a near tie between experts, and another expert computes the token.

Few tokens carry most of the squared deviation, only in mixtures of experts, and it vanishes in FP32. Where both sides'
choices were recorded, the tokens that deviate must be those whose experts moved.
"""

import numpy as np

from mismatch_probe.notation import write_estimate, write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.results import RoutingCheck
from mismatch_probe.stats.routing import MOVED
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

TAIL = 0.01
HEAVY = 0.3
"""Share of the sum of d^2 in the largest hundredth of tokens; 0.08 for a Gaussian."""

WHERE_MOVED = 0.3
"""Share of the sum of d^2 in the tenth of tokens whose experts moved most; 0.1 where the two are unrelated."""


def routing(disagreement: Disagreement) -> Cause | None:
    """The cause for a mixture of experts whose deviation lies in a heavy tail, and where experts moved if recorded."""
    if not disagreement.has_experts:
        return None
    squares = np.sort(disagreement.pair.diff**2)[::-1]
    total = float(squares.sum())
    share = float(squares[: max(1, round(TAIL * squares.size))].sum()) / total if total else 0.0
    if share < HEAVY or (disagreement.routing is not None and not _lies_where_moved(disagreement.routing)):
        return None
    return Code.ROUTING.cause(
        what=f"{write_percent(share)} of the squared deviation lies in 1 % of the tokens, as flips of experts make it",
        evidence=[
            "the checkpoint is a mixture of experts, whose choice of experts is sensitive to rounding",
            f"median abs(d) {write_number(float(np.median(disagreement.pair.abs_diff)))}, largest "
            f"{write_number(float(disagreement.pair.abs_diff.max()))} nats",
            *([] if disagreement.routing is None else choices(disagreement.routing)),
        ],
        advice=["Keep the router in FP32 on both sides, or replay the engine's expert choices while training."],
    )


def choices(check: RoutingCheck) -> list[str]:
    """What was recorded of both sides' choices, as evidence."""
    said = [
        f"the two sides take other experts for {write_estimate(check.in_some_layer)} of the tokens in some layer, and "
        f"their experts' weights are {write_estimate(check.weight_distance)} apart on average"
    ]
    if check.squares_where_moved is not None:
        said.append(
            f"the tenth of tokens whose experts moved most carries {write_estimate(check.squares_where_moved)} of the "
            f"squared deviation, where {MOVED:g} is what unrelated tokens would"
        )
    return said


def _lies_where_moved(check: RoutingCheck) -> bool:
    share = check.squares_where_moved
    return check.in_some_layer.value > 0 and share is not None and share.value >= WHERE_MOVED
