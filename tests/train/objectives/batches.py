"""Sampling rounds from a seed, parts of them, and the losses of an objective on them."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import Objective
from mismatch_probe.train.objectives.losses import LossPlan, LossResult, plan_loss, policy_loss

MAX_NEW_TOKENS = 9
LENGTHS = (3, 7, 1, 5, 9, 2, 4, 6)
GROUPS = (4, 4, 4, 0, 0, 0, 9, 9)
REWARDS = (1.0, 0.0, 1.0, 0.25, 1.0, 0.5, 1.0, 1.0)


def random_batch(seed: int = 0, mismatch: float = 0.5, excluded: Sequence[int] = ()) -> RolloutBatch:
    """Eight responses of three prompts, the last of which all samples solve; float64; d ~ N(0, mismatch^2)."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    old = -3 * torch.rand(num_tokens, generator=random, dtype=torch.float64)
    included = torch.ones(len(LENGTHS), dtype=torch.bool)
    included[list(excluded)] = False
    return RolloutBatch(
        rewards_N=torch.tensor(REWARDS, dtype=torch.float64),
        group_ids_N=torch.tensor(GROUPS),
        lengths_N=torch.tensor(LENGTHS),
        included_N=included,
        old_logprobs_T=old,
        mu_logprobs_T=old + mismatch * torch.randn(num_tokens, generator=random, dtype=torch.float64),
        values_T=torch.rand(num_tokens, generator=random, dtype=torch.float64),
    )


def moved(batch: RolloutBatch, seed: int = 1, by: float = 0.2) -> Tensor:
    """Log-probs of pi some updates later, wanting a gradient."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch.old_logprobs_T.shape, generator=random, dtype=torch.float64)
    return (batch.old_logprobs_T + by * noise).requires_grad_()


def tokens_at(rows: list[int]) -> Tensor:
    starts = [0, *itertools.accumulate(LENGTHS)]
    return torch.tensor([token for row in rows for token in range(starts[row], starts[row + 1])])


def part_of(batch: RolloutBatch, rows: list[int]) -> RolloutBatch:
    tokens = tokens_at(rows)
    assert batch.values_T is not None
    return RolloutBatch(
        batch.rewards_N[rows],
        batch.group_ids_N[rows],
        batch.lengths_N[rows],
        batch.included_N[rows],
        batch.old_logprobs_T[tokens],
        batch.mu_logprobs_T[tokens],
        batch.values_T[tokens],
    )


def planned(objective: Objective, batch: RolloutBatch) -> LossPlan:
    return plan_loss(objective, batch, MAX_NEW_TOKENS)


def whole_loss(objective: Objective, batch: RolloutBatch, logprobs: Tensor) -> LossResult:
    return policy_loss(planned(objective, batch).update(), logprobs, range(len(batch.lengths_N)))


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    [found] = torch.autograd.grad(loss, of, retain_graph=True)
    return found
