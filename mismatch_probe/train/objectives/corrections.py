"""Importance corrections: weights w = pi_old / mu, and what they leave of the batch. No gradient flows through them.

The definitions of `mismatch_probe.stats.rules`, on tensors: log space, a bound of 20, float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.train.objectives.batch import RolloutBatch
from mismatch_probe.train.objectives.choices import Correction
from mismatch_probe.train.objectives.ratios import bounded_weights


@dataclass(frozen=True)
class Corrected:
    """Weight of each token [T], float64, 0 where it is not kept; which tokens stay in the loss; what the rule did.

    Units are the rule's own: tokens or responses. `ess` is Kish's effective share (sum w)^2 / (n sum w^2) of the kept
    ones; None where none is kept.
    """

    weights_T: Tensor
    kept_T: Tensor
    num_units: int
    num_clipped: int
    num_rejected: int
    ess: float | None

    @property
    def share_clipped(self) -> float:
        return self.num_clipped / max(1, self.num_units)

    @property
    def share_rejected(self) -> float:
        return self.num_rejected / max(1, self.num_units)


@torch.no_grad()
def correct(correction: Correction, batch: RolloutBatch) -> Corrected:
    """Weigh, truncate or mask each token, or each response by the product over its tokens.

    Truncation is min(w, C) [Ionides 2008, J. Computational and Graphical Statistics 17:295]; masking keeps w where
    floor <= w <= C and rejects the rest [Seq-MIS: arXiv 2510.26788; IcePop: ring-1T]. A log-prob that is not finite
    makes a weight that is NaN under every rule that weighs: it is neither clipped nor rejected.
    """
    by_token = correction.level == "token"
    diff_T = batch.old_logprobs_T.double() - batch.mu_logprobs_T.double()
    log_weights = diff_T if by_token else batch.responses.sums(diff_T)
    units = batch.included_T if by_token else batch.included_N & (batch.lengths_N > 0)
    weights = bounded_weights(log_weights)
    threshold = math.inf if correction.threshold is None else correction.threshold
    clipped = rejected = torch.zeros_like(units)
    match correction.action:
        case "none":
            weights = torch.ones_like(weights)
        case "truncate":
            clipped = units & (weights > threshold)
            weights = weights.clamp(max=threshold)
        case "mask":
            rejected = units & ((weights > threshold) | (weights < correction.floor))
    kept = units & ~rejected
    applied = torch.where(kept, weights, 0.0)
    return Corrected(
        weights_T=applied if by_token else batch.responses.spread(applied),
        kept_T=kept if by_token else batch.responses.spread(kept),
        num_units=int(units.sum()),
        num_clipped=int(clipped.sum()),
        num_rejected=int(rejected.sum()),
        ess=_effective_share(weights[kept]),
    )


def _effective_share(weights: Tensor) -> float | None:
    return None if weights.numel() == 0 else float(weights.mean() ** 2 / (weights**2).mean())
