"""Causes in a mixture of experts: other experts chosen, or the same ones computed otherwise.

Few tokens carry most of the squared deviation, only in mixtures of experts, and it vanishes in FP32. Where both sides'
choices were recorded, the tokens that deviate must be those whose experts moved.

In FP32 the same router on the same hidden states turns at most a near tie in a thousand tokens. Where it does more, the
first layer that differs says how far the two sides agree.
"""

import numpy as np

from mismatch_probe.notation import write_estimate, write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.results import Estimate, LayerRouting, RoutingCheck
from mismatch_probe.stats.routing import MOVED
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.profile import Disagreement

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


NEAR_TIES = 1e-3
"""Share of tokens for which two right FP32 implementations may take other experts."""

ROUNDED_WEIGHTS = 1e-3
"""Distance of the experts' weights that FP32 cannot reach by rounding: 1e-5 was measured at most on small models."""


def other_experts(disagreement: Disagreement) -> Cause | None:
    """The cause for a pair in FP32 whose sides are known to disagree, and disagree on the experts."""
    if disagreement.routing is None or not disagreement.is_exact or not disagreement.settled:
        return None
    layers = disagreement.routing.layers
    first = next((layer for layer in layers if _differs(layer)), None)
    if first is None:
        return None
    before = (
        "it is the first layer that has experts: its router, or what reaches it, differs"
        if first is layers[0]
        else f"the layers before it that have experts, from {layers[0].layer} on, choose and weigh alike"
    )
    return Code.OTHER_EXPERTS.cause(
        layer=first.layer,
        share=write_percent(first.other_experts.value),
        distance=write_number(first.weight_distance.value),
        evidence=[before, *choices(disagreement.routing)],
        advice=[
            f"Compare the router of layer {first.layer} on both sides: its weights, its bias or score correction (a "
            "buffer, which a weight sync can miss), the format it computes in, and how its scores are normalised."
        ],
    )


def agree_before(disagreement: Disagreement) -> bool:
    """Whether layers with experts come before the first that differs, so that the weights there are the same."""
    return disagreement.routing is not None and not _differs(disagreement.routing.layers[0])


def _differs(layer: LayerRouting) -> bool:
    return _least(layer.other_experts) > NEAR_TIES or _least(layer.weight_distance) > ROUNDED_WEIGHTS


def _least(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low
