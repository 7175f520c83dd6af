"""The surrogate that a step climbs: log pi itself, or a clipped ratio of pi now to pi before the update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.stats.effective_share import LOG_BOUND
from mismatch_probe.train.objectives.batch import ResponseTokens
from mismatch_probe.train.objectives.choices import Ratio


@dataclass(frozen=True)
class Surrogate:
    """What is maximised, by token [T], and at which tokens the clip cuts the gradient off."""

    values_T: Tensor
    clipped_T: Tensor


def surrogate(
    ratio: Ratio, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses: ResponseTokens
) -> Surrogate:
    """Flat tokens of whole responses.

    `none`: A log pi [Williams 1992, Machine Learning 8:229]. `token`: min(r A, clip(r) A) with r = pi / pi_old [PPO,
    arXiv 1707.06347, equation 7; two clips: DAPO, arXiv 2503.14476]. `sequence`: the same with r the geometric mean
    over the response, which every token of it then carries [GSPO, arXiv 2507.18071, equations 5 and 7]. Where A < 0 the
    clips leave r without a bound from above; `dual_clip` is one: max(min(r A, clip(r) A), dual_clip A) [dual-clip PPO,
    arXiv 1912.09729, equation 5; 10 in verl's recipe for DAPO]. Where pi is pi_old the gradient of `token` is that of
    `none`. The logarithm of r is held within 20; where it is not finite, r is NaN.
    """
    if ratio.level == "none":
        return Surrogate(advantages_T * logprobs_T, torch.zeros_like(advantages_T, dtype=torch.bool))
    assert ratio.clip_low is not None
    assert ratio.clip_high is not None
    log_ratio_T = logprobs_T - old_logprobs_T
    if ratio.level == "sequence":
        log_ratio_T = responses.spread(responses.sums(log_ratio_T) / responses.lengths_N)
    ratio_T = bounded_weights(log_ratio_T)
    low, high = 1 - ratio.clip_low, 1 + ratio.clip_high
    clipped_T = ((advantages_T > 0) & (ratio_T > high)) | ((advantages_T < 0) & (ratio_T < low))
    values_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    if ratio.dual_clip is not None:
        bounded_T = torch.maximum(values_T, ratio.dual_clip * advantages_T)
        values_T = torch.where(advantages_T < 0, bounded_T, values_T)
        clipped_T = clipped_T | ((advantages_T < 0) & (ratio_T > ratio.dual_clip))
    return Surrogate(values_T, clipped_T)


def bounded_weights(log_weights: Tensor) -> Tensor:
    """e^x of x held within 20; NaN where x is not finite, because a bound would make a number of what is none."""
    held = log_weights.clamp(-LOG_BOUND, LOG_BOUND)
    return torch.where(log_weights.isfinite(), held, torch.nan).exp()
