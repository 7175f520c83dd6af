"""Causes in the labels: responses exchanged, labels shifted.

Either recorded log-probs agree with the other side's once shifted, or (logits read at the wrong position) the arg-max
tokens do although the log-probs belong to no token that was asked for. Or a side scores tokens that nobody sampled: its
log-probs have nothing to do with the other side's, and lie far below its own entropy, which the other side keeps to.
"""

from typing import Final

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.partners import PartnerTotals
from mismatch_probe.stats.sequences import Array, TokenPair, difference
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.profile import Disagreement, root_mean_square

RESTORED_FLOORS: Final = 5.0
"""Largest rms deviation from the true partner, in floors, where a reference measured one."""


def mispaired(disagreement: Disagreement) -> Cause | None:
    """The cause where the responses that disagree fit other responses' scores."""
    if disagreement.is_rounding:
        return None
    has_floor = disagreement.pair.log_ref is not None
    most = RESTORED_FLOORS * disagreement.floor if has_floor else None
    found = PartnerTotals.of(disagreement.pair, 10 * disagreement.floor, most)
    if not found.are_exchanged:
        return None
    total = disagreement.pair.sequences.num_sequences
    return Code.MISPAIRED.cause(
        count=int(found.off),
        total=total,
        evidence=[
            f"{write_percent(found.share)} of the responses that disagree fit scores of another one",
            f"the other {total - int(found.off)} responses agree",
        ],
        advice=["Join both sides by a response id, not by order; look for a sort, a shuffle or a drop between them."],
    )


SHIFTS = (-2, -1, 1, 2)

RESTORED_BY_SHIFT = 0.25
"""Of the rms of d, the most that may be left after the shift."""

RESTORED_SHARE = 0.75
"""Of the uncertain tokens, the least that the shift must bring closer: one wild token at an edge makes an rms alone."""

LEAST_COMPARED = 32
"""Tokens whose log-probs are correlated."""

LEAST_TOKENS = 8
"""Uncertain tokens that are compared: one or two come closer by chance."""

TOP1_RESTORED = 0.9
TOP1_LOST = 0.6
"""Shares of positions with equal arg-max tokens: at least with the shift, at most without."""

UNLIKE = 0.2
"""Correlation of the two sides' probabilities, the most that those of other tokens have."""

SURPRISED_NATS = 1.0
"""By which the tokens are less likely than the entropy says, the least."""

KEPT_TO = 0.25
"""Of that surprise, the most by which the other side's log-probs may miss the entropy."""

FOLLOWS = (0.5, 1.5)
"""Slope of -log mu over the entropy of the same token: 1 where the tokens were drawn from these distributions."""


def label_offset(disagreement: Disagreement) -> Cause | None:
    """The cause where a shift within each response restores agreement."""
    if disagreement.is_rounding:
        return None
    pair = disagreement.pair
    advice = [
        "The log-prob of token t comes from the logits at position t - 1: check the shift between logits and labels on "
        "the training side, and how responses are cut out of prompt and response."
    ]
    for shift in SHIFTS:
        here, there = pair.sequences.neighbours(shift)
        left = difference(pair.log_pi[there], pair.log_mu[here])
        closer = (np.abs(left) < pair.abs_diff[here])[disagreement.uncertain[here]]
        comes_closer = closer.size >= LEAST_TOKENS and closer.mean() >= RESTORED_SHARE
        if comes_closer and root_mean_square(left) <= RESTORED_BY_SHIFT * disagreement.rms:
            evidence = [
                f"shifting one side by {shift:+d} takes the rms deviation from {write_number(disagreement.rms)} to "
                f"{write_number(root_mean_square(left))} nats and brings {write_percent(closer.mean())} of the "
                "uncertain tokens closer"
            ]
            return Code.LABEL_OFFSET.cause(shift=shift, evidence=evidence, advice=advice)
    if pair.top1_pi is None or pair.top1_mu is None:
        return _other_tokens(pair, advice)
    equal = _share_equal(pair.top1_pi, pair.top1_mu)
    for shift in SHIFTS:
        here, there = pair.sequences.neighbours(shift)
        restored = _share_equal(pair.top1_pi[there], pair.top1_mu[here])
        if equal <= TOP1_LOST and restored >= TOP1_RESTORED:
            evidence = [
                f"arg-max tokens agree at {write_percent(equal)} of positions, and at {write_percent(restored)} when "
                f"shifted by {shift:+d}"
            ]
            return Code.LABEL_OFFSET.cause(shift=shift, evidence=evidence, advice=advice)
    return _other_tokens(pair, advice)


def _other_tokens(pair: TokenPair, advice: list[str]) -> Cause | None:
    """The cause where the tokens that pi scores are not those that mu sampled; None without pi's entropy.

    pi's distributions are known to be right by their entropy, to which the sampled tokens keep, each to its own.
    """
    if pair.entropy_pi is None or pair.sequences.num_tokens < LEAST_COMPARED:
        return None
    entropies = pair.entropy_pi.astype(np.float64)
    entropy = float(entropies.mean())
    of_pi, of_mu = (-float(leg.mean(dtype=np.float64)) for leg in (pair.log_pi, pair.log_mu))
    surprise = of_pi - entropy
    if surprise < SURPRISED_NATS or abs(of_mu - entropy) > KEPT_TO * surprise:
        return None
    prob_pi, prob_mu = (np.exp(leg.astype(np.float64)) for leg in (pair.log_pi, pair.log_mu))
    if not (prob_pi.std() and prob_mu.std() and entropies.std()):
        return None
    correlation = float(np.corrcoef(prob_pi, prob_mu)[0, 1])
    slope = float(np.cov(-pair.log_mu.astype(np.float64), entropies)[0, 1] / entropies.var(ddof=1))
    if correlation > UNLIKE or not FOLLOWS[0] < slope < FOLLOWS[1]:
        return None
    return Cause(
        code=Code.LABEL_OFFSET,
        sentence="The training path scores other tokens than the engine sampled.",
        evidence=[
            f"the two sides' probabilities have a correlation of {write_number(correlation)}",
            f"the training path finds the tokens {write_number(of_pi)} nats unlikely on average and the engine "
            f"{write_number(of_mu)}, where the training path's own entropy is {write_number(entropy)}",
        ],
        advice=[*advice, "See with which ids the training side gathers log-probs, and on which side it pads."],
    )


def _share_equal(first: Array, second: Array) -> float:
    return float(np.mean(first == second)) if first.size else 0.0
