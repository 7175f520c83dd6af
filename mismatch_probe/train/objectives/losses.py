"""The policy loss of an objective, in micro-batches that add up to the loss of the whole update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.train.objectives.advantages import generalized_advantages, group_rewards, sequence_advantages
from mismatch_probe.train.objectives.batch import ResponseTokens, RolloutBatch
from mismatch_probe.train.objectives.choices import Normaliser, Objective
from mismatch_probe.train.objectives.corrections import Corrected, correct
from mismatch_probe.train.objectives.ratios import surrogate


@dataclass(frozen=True)
class LossPlan:
    """All that a sampling round fixes before its updates; nothing here has a gradient.

    `advantages_T` is 0 at tokens outside the loss. `num_flat_groups` of `num_groups` prompts have rewards that are all
    equal. `returns_T` are the critic's targets, where there is a critic.
    """

    objective: Objective
    batch: RolloutBatch
    max_new_tokens: int
    advantages_T: Tensor
    corrected: Corrected
    num_groups: int
    num_flat_groups: int
    returns_T: Tensor | None

    def update(self, rows: Sequence[int] | None = None) -> "Update":
        """What one optimizer step learns from: numbers of responses, all of them by default."""
        batch, kept_T = self.batch, self.corrected.kept_T
        rows_M = torch.as_tensor(
            range(len(batch.lengths_N)) if rows is None else rows, dtype=torch.long, device=batch.lengths_N.device
        )
        num_kept_M = batch.responses.sums(kept_T.double())[rows_M]
        scale_N = torch.full_like(batch.lengths_N, torch.nan, dtype=torch.float64)
        scale_N[rows_M] = _scales(self.objective.normaliser, num_kept_M, self.max_new_tokens)
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
        UsageError: an advantage that compares the samples of a prompt, and a prompt with one.
        ValueError: an objective with a critic and a batch without its values.
    """
    groups = group_rewards(batch.rewards_N, batch.group_ids_N, batch.judged_N)
    corrected = correct(objective.correction, batch)
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
        advantages_T=torch.where(corrected.kept_T, advantages_T, 0.0),
        corrected=corrected,
        num_groups=groups.sizes_G.numel(),
        num_flat_groups=int(groups.flat_G.sum()),
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
        ResponseTokens(batch.lengths_N[rows_B].to(device)),
    )
    coefficients_T = update.coefficients_T[tokens].to(device, dtype)
    return LossResult(
        loss=-torch.where(kept_T, coefficients_T * loss.values_T, 0.0).sum(),
        num_clipped=(loss.clipped_T & kept_T).sum(),
        num_tokens=kept_T.sum(),
    )


def _scales(normaliser: Normaliser, num_kept_M: Tensor, max_new_tokens: int) -> Tensor:
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
