"""The batch of one sampling round, and its advantages.

Advantages from rewards: baselines over the batch or the samples of one prompt, and GAE with a critic.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mismatch_probe.train.objectives.catalogue import AdvantageRule, CriticRule, require_group


@dataclass(frozen=True)
class TokenRows:
    """The response of each flat token, from the number of tokens of each response."""

    lengths_N: Tensor

    @cached_property
    def of_token_T(self) -> Tensor:  # noqa: N802 - shape suffix
        return torch.arange(len(self.lengths_N), device=self.lengths_N.device).repeat_interleave(self.lengths_N)

    def sums(self, values_T: Tensor) -> Tensor:
        """Sum token values by response [N]; differentiable."""
        return values_T.new_zeros(len(self.lengths_N)).index_add(0, self.of_token_T, values_T)

    def spread(self, values_N: Tensor) -> Tensor:
        """Repeat a value of each response at its tokens [T]."""
        return values_N[self.of_token_T]

    def tokens_of(self, rows_B: Tensor) -> Tensor:
        """The indices of the tokens of some responses, in the order of `rows_B`."""
        lengths_B = self.lengths_N[rows_B]
        starts_B = (self.lengths_N.cumsum(0) - self.lengths_N)[rows_B]
        before_B = lengths_B.cumsum(0) - lengths_B
        steps = torch.arange(int(lengths_B.sum()), device=lengths_B.device)
        return steps + (starts_B - before_B).repeat_interleave(lengths_B)


@dataclass(frozen=True)
class RolloutBatch:
    """N responses with T tokens in all, response after response; all tensors on one device.

    Equal `group_ids_N` mark the samples of one prompt. A response with false in `included_N` is in no loss; its reward
    still counts in its group, unless it is no number. Log-probs in nats: `old_logprobs_T` of pi before the update,
    `mu_logprobs_T` as sampled. `values_T` is the critic's value of the state before each token.
    """

    rewards_N: Tensor
    group_ids_N: Tensor
    lengths_N: Tensor
    included_N: Tensor
    old_logprobs_T: Tensor
    mu_logprobs_T: Tensor
    values_T: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, num_tokens = len(self.lengths_N), int(self.lengths_N.sum())
        for name, tensor, size in (
            ("rewards_N", self.rewards_N, num_rows),
            ("group_ids_N", self.group_ids_N, num_rows),
            ("included_N", self.included_N, num_rows),
            ("old_logprobs_T", self.old_logprobs_T, num_tokens),
            ("mu_logprobs_T", self.mu_logprobs_T, num_tokens),
            ("values_T", self.values_T, num_tokens),
        ):
            if tensor is not None and tensor.shape != (size,):
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and lengths_N asks for ({size},)")

    @cached_property
    def responses(self) -> TokenRows:
        return TokenRows(self.lengths_N)

    @cached_property
    def judged_N(self) -> Tensor:  # noqa: N802 - shape suffix
        return self.included_N | self.rewards_N.isfinite()

    @cached_property
    def included_T(self) -> Tensor:  # noqa: N802 - shape suffix
        return self.responses.spread(self.included_N)


STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
"""Added to a group's standard deviation, or to the variance of all tokens, before dividing by it, as verl does."""


@dataclass(frozen=True)
class Groups:
    """The samples of each prompt as groups.

    `judged_N` marks the responses that count in their group; `judged_G` is their number in each group. A group is flat
    where their rewards are all equal: it teaches nothing. A group with NaN or infinity is not flat.
    """

    of_response_N: Tensor
    sizes_G: Tensor
    judged_N: Tensor
    judged_G: Tensor
    flat_G: Tensor

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum response values by group [G]."""
        return values_N.new_zeros(len(self.sizes_G)).index_add(0, self.of_response_N, values_N)

    def spread(self, values_G: Tensor) -> Tensor:
        """Repeat a value of each group at its responses [N]."""
        return values_G[self.of_response_N]


def group_rewards(rewards_N: Tensor, group_ids_N: Tensor, judged_N: Tensor | None = None) -> Groups:
    """Responses that are not judged count in no group; all are judged by default."""
    _, of_response_N, sizes_G = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    rewards = rewards_N.double()
    judged_N = torch.ones_like(rewards, dtype=torch.bool) if judged_N is None else judged_N
    empty = torch.zeros(sizes_G.numel(), dtype=torch.float64, device=rewards.device)
    of_judged, rewards_of_judged = of_response_N[judged_N], rewards[judged_N]
    most = empty.scatter_reduce(0, of_judged, rewards_of_judged, "amax", include_self=False)
    least = empty.scatter_reduce(0, of_judged, rewards_of_judged, "amin", include_self=False)
    judged_G = empty.index_add(0, of_judged, torch.ones_like(rewards_of_judged))
    return Groups(of_response_N, sizes_G, judged_N, judged_G, (most == least) & most.isfinite())


@torch.no_grad()
def sequence_advantages(rule: AdvantageRule, rewards_N: Tensor, groups: Groups) -> Tensor:
    """One advantage a response [N], float64; exactly 0 in a flat group under the rules on groups, and where a response
    is not judged.

    `reward`: r, REINFORCE without a baseline [Williams 1992, Machine Learning 8:229]. `batch-mean`: r minus the mean
    over the batch, his reinforcement baseline. `group-mean`: r minus the mean of the prompt's samples [Dr. GRPO,
    arXiv 2503.20783]. `group-mean-std`: that over the group's sample standard deviation [GRPO, arXiv 2402.03300].
    `leave-one-out`: r minus the mean of the other samples [RLOO, arXiv 2402.14740].
    """
    rewards = torch.where(groups.judged_N, rewards_N.double(), 0.0)
    if rule == "reward":
        return rewards
    if rule == "batch-mean":
        return torch.where(groups.judged_N, rewards - rewards.sum() / groups.judged_G.sum().clamp(min=1), 0.0)
    require_group(rule, int(groups.sizes_G.min()))
    sizes, others = groups.judged_G.clamp(min=1), (groups.judged_G - 1).clamp(min=1)
    offsets = torch.where(groups.judged_N, rewards - groups.spread(groups.sums(rewards) / sizes), 0.0)
    if rule == "leave-one-out":
        offsets = offsets * groups.spread(sizes / others)
    if rule == "group-mean-std":
        deviation = (groups.sums(offsets**2) / others).sqrt()
        offsets = offsets / groups.spread(deviation + STD_EPSILON)
    return torch.where(groups.spread(groups.flat_G), 0.0, offsets)


@torch.no_grad()
def generalized_advantages(batch: RolloutBatch, critic: CriticRule) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token [T], float64 [GAE, arXiv 1506.02438, equation 16].

    The reward stands at a response's last token; the value after it is 0. Returns are the advantages plus the values.
    The advantages are then whitened over all tokens in the loss, as PPO on language models does [arXiv 1909.08593], by
    their sample variance [verl's `masked_whiten`]; a single one becomes 0.
    """
    assert batch.values_T is not None
    lengths_N = batch.lengths_N
    is_token_NS = torch.arange(int(lengths_N.max()), device=lengths_N.device) < lengths_N[:, None]
    values_NS = torch.zeros(is_token_NS.shape, dtype=torch.float64, device=lengths_N.device)
    values_NS[is_token_NS] = batch.values_T.double()
    advantages_NS = torch.zeros_like(values_NS)
    gained_N = torch.where(batch.judged_N, batch.rewards_N.double(), 0.0)
    advantage_N = torch.zeros_like(gained_N)
    for position in reversed(range(values_NS.shape[1])):
        is_token_N, value_N = is_token_NS[:, position], values_NS[:, position]
        here_N = gained_N - value_N + critic.discount * critic.gae_lambda * advantage_N
        advantages_NS[:, position] = here_N
        advantage_N = torch.where(is_token_N, here_N, advantage_N)
        gained_N = torch.where(is_token_N, critic.discount * value_N, gained_N)
    advantages_T = advantages_NS[is_token_NS]
    steps = advantages_T[batch.included_T]
    variance = (steps - steps.mean()).square().sum() / max(steps.numel() - 1, 1)
    whitened_T = (advantages_T - steps.mean()) * torch.rsqrt(variance + VARIANCE_EPSILON)
    return whitened_T, advantages_T + batch.values_T.double()
