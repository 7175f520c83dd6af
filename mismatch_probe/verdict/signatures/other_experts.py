"""The two sides choose other experts, or weigh them otherwise, where rounding cannot be the reason.

In FP32 the same router on the same hidden states turns at most a near tie in a thousand tokens. Where it does more, the
first layer that differs says how far the two sides agree.
"""

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.results import Estimate, LayerRouting
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.routing import choices

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
