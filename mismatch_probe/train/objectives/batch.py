"""What one sampling round brings to an objective."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ResponseTokens:
    """Which response each flat token belongs to, from the number of tokens of each."""

    lengths_N: Tensor

    @cached_property
    def of_token_T(self) -> Tensor:  # noqa: N802 - shape suffix
        return torch.arange(len(self.lengths_N), device=self.lengths_N.device).repeat_interleave(self.lengths_N)

    def sums(self, values_T: Tensor) -> Tensor:
        """Of each response [N]; differentiable."""
        return values_T.new_zeros(len(self.lengths_N)).index_add(0, self.of_token_T, values_T)

    def spread(self, values_N: Tensor) -> Tensor:
        """A response's value at each of its tokens [T]."""
        return values_N[self.of_token_T]

    def tokens_of(self, rows_B: Tensor) -> Tensor:
        """Where the tokens of some responses stand, response after response in the order of `rows_B`."""
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
    def responses(self) -> ResponseTokens:
        return ResponseTokens(self.lengths_N)

    @cached_property
    def judged_N(self) -> Tensor:  # noqa: N802 - shape suffix
        return self.included_N | self.rewards_N.isfinite()

    @cached_property
    def included_T(self) -> Tensor:  # noqa: N802 - shape suffix
        return self.responses.spread(self.included_N)
