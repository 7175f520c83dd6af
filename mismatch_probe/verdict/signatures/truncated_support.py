"""Top-p, top-k or min-p renormalised on one side only.

If mu keeps a part of the vocabulary with mass K under pi and renormalises, log mu = log pi - log K for every sampled
token: d = log K <= 0, never above 0, and the mean of e^d is the kept mass instead of 1. Two policies that normalise
over the same support have mean e^d = 1 under mu, however much they round, so d cannot be one-signed.

How far d lies on the side of 0 to which no truncation can bring it is the size of rounding, as d itself shows it: it
counts where the measured floor is larger than what is cut, or was not measured at all.
"""

from collections.abc import Iterator

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.sequences import Floats, TokenPair, difference
from mismatch_probe.stats.weights import weight_excess
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

WRONG_SIGN = 0.005
"""Most tokens that may lie on the wrong side of zero by more than rounding."""

LEAST_TRUNCATED = 0.02
"""Least share of tokens whose context was truncated by more than rounding."""

VARIATION_IN_FLOORS = 3.0
VARIATION_IN_MEANS = 0.1
"""Standard deviation of d, by either measure: kept mass varies from context to context, a constant offset does not."""

LEAST_CORRELATION = 0.8
"""Of the two sides' log-probs, where rounding is read from d: those of other tokens can lie on one side of 0, too."""

LEAST_KEPT = 0.2
"""Mass that a cut leaves at least where the sides do not correlate: top-k 1 of 200 tokens with logits of standard
deviation 3 leaves 0.39, a side that scores other tokens, or all tokens alike, 0.02 or less."""

LEAST_CUT = 0.01
"""Mass that must be cut for that: a log-softmax in 16 bit moves the mean weight by 0.005."""

FAR_OUTSIDE = 8.0
"""Standard errors by which the mean weight must miss 1."""


def truncated_support(disagreement: Disagreement) -> Cause | None:
    """The cause where d is one-signed and the weights' mean is the kept mass.

    The engine's own prefill, which covers the whole vocabulary, stands in for pi where it was recorded, so that
    nothing else which differs between the sides can hide it.
    """
    pair = disagreement.pair
    own = [] if pair.log_mu_prefill is None else [difference(pair.log_mu_prefill, pair.log_mu)]
    for d in (*own, pair.diff):
        cause = _one_signed(disagreement, d, -1.0, "The engine")
        if cause is not None:
            return cause
    return _one_signed(disagreement, pair.diff, 1.0, "The training path")


def _one_signed(disagreement: Disagreement, diff: Floats, sign: float, side: str) -> Cause | None:
    d = sign * diff
    least = min(VARIATION_IN_FLOORS * disagreement.floor, VARIATION_IN_MEANS * abs(float(np.mean(d))))
    weight = Estimator(disagreement.pair.sequences).mean(1 + weight_excess(diff), "token", Scale.POSITIVE)
    if np.std(d) < least or weight is None or weight.low is None or weight.high is None:
        return None
    kept = weight.value if sign < 0 else 1 / weight.value
    if kept < LEAST_KEPT and not _correlate(disagreement.pair):
        return None
    cut, error = sign * (weight.value - 1), (weight.high - weight.low) / 4
    shares = [
        (float(np.mean(d < -tolerance)), float(np.mean(d > tolerance)))
        for tolerance, least_cut in _tolerances(disagreement, d)
        if cut >= max(least_cut, FAR_OUTSIDE * error)
    ]
    wrong, truncated = next(
        (share for share in shares if share[0] <= WRONG_SIGN and share[1] >= LEAST_TRUNCATED), (1.0, 0.0)
    )
    if not truncated:
        return None
    return Code.TRUNCATED_SUPPORT.cause(
        side=side,
        evidence=[
            f"d is one-signed: {write_percent(truncated)} of tokens lie beyond rounding on one side of 0, "
            f"{write_percent(wrong)} on the other",
            f"the mean weight is {weight.value:.4f} instead of 1: the kept mass",
            f"largest abs(d): {write_number(float(np.abs(diff).max()))} nats",
        ],
        advice=[
            "Sample with top_p=1 and top_k off, or apply the same truncation to the training path's logits; check "
            "which defaults the engine takes from generation_config.json."
        ],
    )


def _tolerances(disagreement: Disagreement, d: Floats) -> Iterator[tuple[float, float]]:
    """What rounding can do to a token (nats), and the least mass that must be cut: by the measured floor, then by how
    far d lies on the wrong side of 0.
    """
    yield 6 * disagreement.floor, 0.0
    if _correlate(disagreement.pair):
        yield max(float(np.quantile(-d, 1 - WRONG_SIGN, method="higher")), 0.0), LEAST_CUT


def _correlate(pair: TokenPair) -> bool:
    varies = pair.log_mu.std() > 0 and pair.log_pi.std() > 0
    return bool(varies and np.corrcoef(pair.log_pi, pair.log_mu)[0, 1] >= LEAST_CORRELATION)
