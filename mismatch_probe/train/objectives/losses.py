"""The surrogate that a step climbs: log pi itself, or a clipped ratio of pi now to pi before the update.

Importance corrections: weights w = pi_old / mu, and what they leave of the batch. No gradient flows through them.

The definitions of `mismatch_probe.stats.corrections`, on tensors: log space, a bound of 20, float64.

The policy loss of an objective, in micro-batches that add up to the loss of the whole update.

The critic's loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.stats.tails import LOG_BOUND
from mismatch_probe.train.objectives.advantages import (
    RolloutBatch,
    TokenRows,
    generalized_advantages,
    group_rewards,
    sequence_advantages,
)
from mismatch_probe.train.objectives.catalogue import Correction, Normaliser, Objective, Ratio


@dataclass(frozen=True)
class Surrogate:
    """What is maximised, by token [T], and at which tokens the clip cuts the gradient off."""

    values_T: Tensor
    clipped_T: Tensor


def surrogate(
    ratio: Ratio, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses: TokenRows
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
    log_weights_in_bounds = log_weights.clamp(-LOG_BOUND, LOG_BOUND)
    return torch.where(log_weights.isfinite(), log_weights_in_bounds, torch.nan).exp()


@dataclass(frozen=True)
class BatchCorrection:
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
def correct(correction: Correction, batch: RolloutBatch) -> BatchCorrection:
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
    is_clipped = is_rejected = torch.zeros_like(units)
    match correction.action:
        case "none":
            weights = torch.ones_like(weights)
        case "truncate":
            is_clipped = units & (weights > threshold)
            weights = weights.clamp(max=threshold)
        case "mask":
            is_rejected = units & ((weights > threshold) | (weights < correction.floor))
    is_kept = units & ~is_rejected
    weights_in_loss = torch.where(is_kept, weights, 0.0)
    return BatchCorrection(
        weights_T=weights_in_loss if by_token else batch.responses.spread(weights_in_loss),
        kept_T=is_kept if by_token else batch.responses.spread(is_kept),
        num_units=int(units.sum()),
        num_clipped=int(is_clipped.sum()),
        num_rejected=int(is_rejected.sum()),
        ess=_effective_share(weights[is_kept]),
    )


def _effective_share(weights: Tensor) -> float | None:
    return None if weights.numel() == 0 else float(weights.mean() ** 2 / (weights**2).mean())


@dataclass(frozen=True)
class LossPlan:
    """All that a sampling round fixes before its updates; nothing here has a gradient.

    `advantages_T` is 0 at tokens outside the loss. `returns_T` are the critic's targets, where there is a critic.
    """

    objective: Objective
    batch: RolloutBatch
    max_new_tokens: int
    advantages_T: Tensor
    corrected: BatchCorrection
    returns_T: Tensor | None

    def update(self, rows: Sequence[int] | None = None) -> "Update":
        """What one optimizer step learns from: numbers of responses, all of them by default."""
        batch, kept_T = self.batch, self.corrected.kept_T
        rows_M = torch.as_tensor(
            range(len(batch.lengths_N)) if rows is None else rows, dtype=torch.long, device=batch.lengths_N.device
        )
        num_kept_M = batch.responses.sums(kept_T.double())[rows_M]
        scale_N = torch.full_like(batch.lengths_N, torch.nan, dtype=torch.float64)
        scale_N[rows_M] = _token_coefficients(self.objective.normaliser, num_kept_M, self.max_new_tokens)
        num_tokens = (batch.lengths_N * batch.included_N)[rows_M].sum()
        return Update(self, self.corrected.weights_T * batch.responses.spread(scale_N), num_tokens)


@dataclass(frozen=True)
class Update:
    """A plan with the denominators of one optimizer step.

    `coefficients_T` is what a token's surrogate counts in the loss: weight over denominator; NaN in responses of other
    steps. `num_tokens` are in the loss before any is rejected.
    """

    plan: LossPlan
    coefficients_T: Tensor
    num_tokens: Tensor


@dataclass(frozen=True)
class LossResult:
    """`loss` is to be minimised; of `num_tokens` kept tokens the clip cut off the gradient at `num_clipped`."""

    loss: Tensor
    num_clipped: Tensor
    num_tokens: Tensor


@torch.no_grad()
def plan_loss(objective: Objective, batch: RolloutBatch, max_new_tokens: int) -> LossPlan:
    """Advantages, weights and what they keep. `max_new_tokens` is the constant of the normaliser `constant-length`.

    Raises:
        ValueError: an objective with a critic and a batch without its values.
    """
    groups = group_rewards(batch.rewards_N, batch.group_ids_N, batch.judged_N)
    correction = correct(objective.correction, batch)
    returns_T = None
    if objective.critic is None:
        advantages_N = sequence_advantages(objective.advantage, batch.rewards_N, groups)
        advantages_T = batch.responses.spread(advantages_N)
    elif batch.values_T is None:
        raise ValueError(f"objective {objective.name} has a critic, and the batch has no values_T")
    else:
        advantages_T, returns_T = generalized_advantages(batch, objective.critic)
    return LossPlan(
        objective=objective,
        batch=batch,
        max_new_tokens=max_new_tokens,
        advantages_T=torch.where(correction.kept_T, advantages_T, 0.0),
        corrected=correction,
        returns_T=returns_T,
    )


def policy_loss(update: Update, logprobs_T: Tensor, rows: Sequence[int]) -> LossResult:
    """The share of some responses in the update's loss: minus the sum over kept tokens of coefficient x surrogate.

    `logprobs_T` are pi's, with gradient, of the tokens of `rows` in that order; computed in their dtype, FP32 at the
    least. Where nothing is kept the loss is 0 and so is its gradient.

    Raises:
        ValueError: another number of log-probs than these responses have tokens.
    """
    plan, device = update.plan, logprobs_T.device
    batch = plan.batch
    rows_B = torch.as_tensor(rows, dtype=torch.long, device=batch.lengths_N.device)
    tokens = batch.responses.tokens_of(rows_B)
    if logprobs_T.shape != tokens.shape:
        raise ValueError(f"{tuple(logprobs_T.shape)} log-probs for responses with {len(tokens)} tokens")
    dtype = torch.promote_types(logprobs_T.dtype, torch.float32)
    kept_T = plan.corrected.kept_T[tokens].to(device)
    loss = surrogate(
        plan.objective.ratio,
        logprobs_T.to(dtype),
        batch.old_logprobs_T[tokens].to(device, dtype),
        plan.advantages_T[tokens].to(device, dtype),
        TokenRows(batch.lengths_N[rows_B].to(device)),
    )
    coefficients_T = update.coefficients_T[tokens].to(device, dtype)
    return LossResult(
        loss=-torch.where(kept_T, coefficients_T * loss.values_T, 0.0).sum(),
        num_clipped=(loss.clipped_T & kept_T).sum(),
        num_tokens=kept_T.sum(),
    )


def _token_coefficients(normaliser: Normaliser, num_kept_M: Tensor, max_new_tokens: int) -> Tensor:
    """What one kept token of each response counts [M]; what is rejected is in no denominator.

    `token`: 1 / kept tokens of the update [DAPO, arXiv 2503.14476, equation 8]. `sequence`: the mean over responses of
    the mean over their tokens [GRPO, arXiv 2402.03300, equation 3]. `constant-length`: 1 / (responses x the longest
    that may be sampled) [Dr. GRPO, arXiv 2503.20783, section 3.2]. Responses of which nothing is kept are not counted.
    """
    num_responses = (num_kept_M > 0).sum().clamp(min=1)
    match normaliser:
        case "token":
            return torch.ones_like(num_kept_M) / num_kept_M.sum().clamp(min=1)
        case "sequence":
            return 1 / (num_kept_M.clamp(min=1) * num_responses)
        case "constant-length":
            return torch.ones_like(num_kept_M) / (num_responses * max_new_tokens)


def value_loss(update: Update, values_T: Tensor, rows: Sequence[int]) -> Tensor:
    """The share of some responses in the update's value loss: half the squared error to the returns, clipped.

    max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, the mean over all tokens of the update's included
    responses [PPO's reference implementation, openai/baselines ppo2; verl]. No correction applies. `values_T` are the
    critic's, with gradient, of the tokens of `rows` in that order; computed in their dtype, FP32 at the least.

    Raises:
        ValueError: another number of values than these responses have tokens.
    """
    plan, device = update.plan, values_T.device
    batch, critic = plan.batch, plan.objective.critic
    assert critic is not None, "only an objective with a critic has a value loss"
    assert batch.values_T is not None
    assert plan.returns_T is not None
    tokens = batch.responses.tokens_of(torch.as_tensor(rows, dtype=torch.long, device=batch.lengths_N.device))
    if values_T.shape != tokens.shape:
        raise ValueError(f"{tuple(values_T.shape)} values for responses with {len(tokens)} tokens")
    dtype = torch.promote_types(values_T.dtype, torch.float32)
    included_T = batch.included_T[tokens].to(device)
    new_T = torch.where(included_T, values_T.to(dtype), 0.0)
    old_T, returns_T = (tensor[tokens].to(device, dtype) for tensor in (batch.values_T, plan.returns_T))
    near_T = new_T.clamp(old_T - critic.value_clip, old_T + critic.value_clip)
    errors_T = torch.maximum((new_T - returns_T) ** 2, (near_T - returns_T) ** 2) / 2
    return torch.where(included_T, errors_T, 0.0).sum() / update.num_tokens.clamp(min=1).to(device)
