"""From responses to gradients: pi's log-probs, and backward passes in micro-batches over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gathered, world_size
from mismatch_probe.train.micro_batches import gathered_tokens, micro_batches
from mismatch_probe.train.objectives.batch import RolloutBatch
from mismatch_probe.train.objectives.losses import Update, policy_loss
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout


@dataclass(frozen=True)
class Scored:
    """Before the update, of every response on every rank: pi's log-probs and entropies [T], nats, the critic's values.

    `graph` and `values_graph` hold this rank's log-probs and values with their graph where one micro-batch holds them
    all, so that the first update need not compute them again.
    """

    log_pi_T: Floats
    entropy_T: Floats
    graph: torch.Tensor | None
    values_T: Floats | None = None
    values_graph: torch.Tensor | None = None

    def without_graphs(self) -> Self:
        """For the updates after the first, whose backward pass has used them up."""
        return replace(self, graph=None, values_graph=None)


@dataclass(frozen=True)
class Accumulated:
    """An update's loss before any scaling, and the share of its kept tokens where the clip cut the gradient."""

    loss: float
    clipped_share: float


class Learner:
    """Scores responses and accumulates gradients; every rank must call the same methods with the same responses."""

    def __init__(self, policy: Policy, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> Scored:
        """pi's log-probs of the responses as it is now."""
        batches = micro_batches(rollouts, range(len(rollouts)), self._micro_batch_tokens)
        with_graph = keep_graph and len(batches) == 1
        with torch.set_grad_enabled(with_graph), self._policy.computing():
            passes = [self._policy.logprobs(batch.of(rollouts)) for batch in batches]
        return Scored(
            gathered_tokens(rollouts, batches, [logprobs_T for logprobs_T, _ in passes]),
            gathered_tokens(rollouts, batches, [entropy_T for _, entropy_T in passes]),
            passes[0][0] if with_graph else None,
        )

    def accumulate(
        self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], scored: Scored, scale: float
    ) -> Accumulated:
        """Add the gradient of `scale` times the update's loss over `rows` to the parameters.

        FSDP averages over ranks, so each rank's share of the sum counts as often as there are ranks.
        """
        losses, clipped, kept = 0.0, 0, 0
        with self._policy.computing():
            for batch in micro_batches(rollouts, rows, self._micro_batch_tokens):
                if scored.graph is not None:
                    logprobs_T = scored.graph
                else:
                    logprobs_T, _ = self._policy.logprobs(batch.of(rollouts))
                if batch.is_filler:
                    (logprobs_T.sum() * 0).backward()
                    continue
                result = policy_loss(update, logprobs_T, batch.rows)
                (result.loss * (scale * world_size())).backward()
                losses += float(result.loss.detach())
                clipped += int(result.num_clipped)
                kept += int(result.num_tokens)
        totals = np.sum(gathered([(losses, clipped, kept)]), axis=0)
        return Accumulated(float(totals[0]), float(totals[1] / max(1, totals[2])))


def rollout_batch(
    rollouts: Sequence[Rollout], log_pi_T: Floats, included: Sequence[bool], values_T: Floats | None = None
) -> RolloutBatch:
    """The step's responses as the objective takes them, on the CPU."""
    groups = np.unique([rollout.prompt_id for rollout in rollouts], return_inverse=True)[1]
    return RolloutBatch(
        rewards_N=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        group_ids_N=torch.from_numpy(groups),
        lengths_N=torch.tensor([rollout.length for rollout in rollouts]),
        included_N=torch.tensor(list(included)),
        old_logprobs_T=torch.from_numpy(log_pi_T),
        mu_logprobs_T=torch.from_numpy(np.concatenate([rollout.mu_logprobs for rollout in rollouts])),
        values_T=None if values_T is None else torch.from_numpy(values_T),
    )
