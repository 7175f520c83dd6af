"""Correction rules in use, each named for what it does: truncate a weight, mask (weigh and reject), or only reject.

Sources: token and sequence truncation and masking, geometric rejection, k3 and veto from verl's rollout correction (its
C is 2, TRL's and arXiv 2510.26788's 3); IcePop from ring-1T (0.5 to 5); the probability mask of DPPO from arXiv
2602.04879; off-policy sequence masking from DeepSeek-V3.2 (threshold of slime). The last two look at the advantage's
sign: the rule is shown as if every advantage had the sign it acts on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from mismatch_probe.stats.sequences import Floats, Mask
from mismatch_probe.stats.weights import bounded, weight_excess

CAPS = (2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class TokenEvidence:
    """What a rule on tokens looks at [n]: d, and the probability under pi minus that under mu."""

    log_ratio: Floats
    prob_diff: Floats


@dataclass(frozen=True)
class SequenceEvidence:
    """What a rule on sequences looks at [N]: S, S / T, the mean k3 term of its tokens, its smallest d."""

    log_ratio: Floats
    mean_log_ratio: Floats
    mean_k3: Floats
    least_log_ratio: Floats


@dataclass(frozen=True)
class AppliedWeights:
    """Applied weight minus 1 of what is kept, what is kept, and what is kept with a smaller weight than its own."""

    excess: Floats
    kept: Mask
    clipped: Mask


Evidence = TypeVar("Evidence", TokenEvidence, SequenceEvidence)


@dataclass(frozen=True)
class Rule(Generic[Evidence]):
    name: str
    also_known_as: str
    decide: Callable[[Evidence], AppliedWeights]


def _weigh(evidence: TokenEvidence | SequenceEvidence) -> AppliedWeights:
    return _mask(evidence, 0.0, math.inf)


def _truncate(evidence: TokenEvidence | SequenceEvidence, cap: float) -> AppliedWeights:
    clipped = evidence.log_ratio > math.log(cap)
    excess = np.where(clipped, cap - 1, weight_excess(evidence.log_ratio))
    return AppliedWeights(excess, np.ones_like(clipped), clipped)


def _mask(evidence: TokenEvidence | SequenceEvidence, low: float, high: float) -> AppliedWeights:
    weight = np.exp(bounded(evidence.log_ratio))
    return _weighing(evidence, (weight >= low) & (weight <= high))


def _drop_raised(evidence: TokenEvidence, most: float) -> AppliedWeights:
    return _weighing(evidence, evidence.prob_diff <= most)


def _drop_lowered(evidence: TokenEvidence, most: float) -> AppliedWeights:
    return _weighing(evidence, evidence.prob_diff >= -most)


def _reject_geometric(evidence: SequenceEvidence, low: float, high: float) -> AppliedWeights:
    mean = np.exp(bounded(evidence.mean_log_ratio))
    return _unweighted((mean >= low) & (mean <= high))


def _reject_k3(evidence: SequenceEvidence, most: float) -> AppliedWeights:
    return _unweighted(evidence.mean_k3 <= most)


def _reject_veto(evidence: SequenceEvidence, least: float) -> AppliedWeights:
    return _unweighted(evidence.least_log_ratio >= math.log(least))


def _reject_k1(evidence: SequenceEvidence, most: float) -> AppliedWeights:
    return _unweighted(-evidence.mean_log_ratio <= most)


def _weighing(evidence: TokenEvidence | SequenceEvidence, kept: Mask) -> AppliedWeights:
    return AppliedWeights(weight_excess(evidence.log_ratio), kept, np.zeros_like(kept))


def _unweighted(kept: Mask) -> AppliedWeights:
    return AppliedWeights(np.zeros(kept.shape), kept, np.zeros_like(kept))


TOKEN_RULES: tuple[Rule[TokenEvidence], ...] = (
    Rule("token_weight", "token-level importance sampling", _weigh),
    *(Rule(f"token_truncate_{cap:g}", "Token-TIS", partial(_truncate, cap=cap)) for cap in CAPS),
    Rule("token_mask_0.5_5", "IcePop", partial(_mask, low=0.5, high=5.0)),
    Rule("token_drop_raised_0.2", "DPPO's mask where the advantage is positive", partial(_drop_raised, most=0.2)),
    Rule("token_drop_lowered_0.2", "DPPO's mask where the advantage is negative", partial(_drop_lowered, most=0.2)),
)

SEQUENCE_RULES: tuple[Rule[SequenceEvidence], ...] = (
    Rule("sequence_weight", "PG-Seq-IS", _weigh),
    *(Rule(f"sequence_truncate_{cap:g}", "Seq-TIS", partial(_truncate, cap=cap)) for cap in CAPS),
    *(Rule(f"sequence_mask_{cap:g}", "Seq-MIS", partial(_mask, low=0.0, high=cap)) for cap in CAPS),
    Rule("sequence_reject_geometric_0.999_1.001", "Geo-RS", partial(_reject_geometric, low=0.999, high=1.001)),
    Rule("sequence_reject_k3_0.01", "K3-RS", partial(_reject_k3, most=0.01)),
    Rule("sequence_reject_veto_0.0001", "token veto", partial(_reject_veto, least=1e-4)),
    Rule("sequence_reject_k1_0.0001", "DeepSeek-V3.2's mask, advantage negative", partial(_reject_k1, most=1e-4)),
)

SMALLEST_CAP = math.log(2.0)
SMALLEST_PROB_DIFF = 0.2
"""No rule on tokens changes the weight of one with abs(d) up to the former and abs(pi - mu) up to the latter."""
