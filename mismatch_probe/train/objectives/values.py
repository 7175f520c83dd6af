"""The critic's loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_probe.train.objectives.losses import Update


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
    old_T, returns_T = (given[tokens].to(device, dtype) for given in (batch.values_T, plan.returns_T))
    near_T = new_T.clamp(old_T - critic.value_clip, old_T + critic.value_clip)
    errors_T = torch.maximum((new_T - returns_T) ** 2, (near_T - returns_T) ** 2) / 2
    return torch.where(included_T, errors_T, 0.0).sum() / update.num_tokens.clamp(min=1).to(device)
