"""From responses to gradients: pi's log-probs, and backward passes in micro-batches over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gathered, largest, rank, world_size
from mismatch_probe.train.objectives.batch import RolloutBatch
from mismatch_probe.train.objectives.losses import Update, policy_loss
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.training_path.batching import plan_batches


@dataclass(frozen=True)
class Scored:
    """pi before the update, of every response on every rank: log-probs and entropies [T], nats.

    `graph` holds this rank's log-probs with their graph where one micro-batch holds them all, so that the first update
    need not compute them again.
    """

    log_pi_T: Floats
    entropy_T: Floats
    graph: torch.Tensor | None


@dataclass(frozen=True)
class Accumulated:
    """An update's loss before any scaling, and the share of its kept tokens where the clip cut the gradient."""

    loss: float
    clipped_share: float


@dataclass(frozen=True)
class _MicroBatch:
    """Responses of one forward pass; a filler is computed for nothing, by a rank that has fewer."""

    rows: list[int]
    is_filler: bool = False


class Learner:
    """Scores responses and accumulates gradients; every rank must call the same methods with the same responses."""

    def __init__(self, policy: Policy, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> Scored:
        """pi's log-probs of the responses as it is now."""
        own = _own_rows(range(len(rollouts)))
        batches = self._micro_batches(rollouts, own)
        graph = None
        parts: list[tuple[int, Floats, Floats]] = []
        with_graph = keep_graph and len(batches) == 1
        with torch.set_grad_enabled(with_graph), self._policy.computing():
            for batch in batches:
                rows = batch.rows
                logprobs_T, entropy_T = self._policy.logprobs([rollouts[row].sequence for row in rows])
                graph = logprobs_T if with_graph else None
                ends = np.cumsum([rollouts[row].length for row in rows])[:-1]
                logprobs = np.split(logprobs_T.detach().double().cpu().numpy(), ends)
                entropies = np.split(entropy_T.double().cpu().numpy(), ends)
                if not batch.is_filler:
                    parts += zip(rows, logprobs, entropies, strict=True)
        found = {row: (logprobs, entropy) for row, logprobs, entropy in gathered(parts)}
        in_order = [found[row] for row in range(len(rollouts))]
        return Scored(
            np.concatenate([logprobs for logprobs, _ in in_order]),
            np.concatenate([entropy for _, entropy in in_order]),
            graph,
        )

    def accumulate(
        self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], scored: Scored, scale: float
    ) -> Accumulated:
        """Add the gradient of `scale` times the update's loss over `rows` to the parameters.

        FSDP averages over ranks, so each rank's share of the sum counts as often as there are ranks.
        """
        losses, clipped, kept = 0.0, 0, 0
        with self._policy.computing():
            for batch in self._micro_batches(rollouts, _own_rows(rows)):
                if scored.graph is not None:
                    logprobs_T = scored.graph
                else:
                    logprobs_T, _ = self._policy.logprobs([rollouts[row].sequence for row in batch.rows])
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

    def _micro_batches(self, rollouts: Sequence[Rollout], own: Sequence[int]) -> list[_MicroBatch]:
        """As many on every rank, because each forward pass gathers weights from all."""
        lengths = [rollouts[row].sequence.num_tokens for row in own]
        fits_in_one = lengths and len(lengths) * max(lengths) <= self._micro_batch_tokens
        planned = [list(range(len(own)))] if fits_in_one else plan_batches(lengths, self._micro_batch_tokens)
        batches = [_MicroBatch([own[index] for index in batch]) for batch in planned]
        return batches + [_MicroBatch([0], is_filler=True)] * (largest(len(batches)) - len(batches))


def _own_rows(rows: Sequence[int]) -> list[int]:
    return list(rows)[rank() :: world_size()]


def rollout_batch(rollouts: Sequence[Rollout], log_pi_T: Floats, included: Sequence[bool]) -> RolloutBatch:
    """The step's responses as the objective takes them, on the CPU."""
    groups = np.unique([rollout.prompt_id for rollout in rollouts], return_inverse=True)[1]
    return RolloutBatch(
        rewards_N=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        group_ids_N=torch.from_numpy(groups),
        lengths_N=torch.tensor([rollout.length for rollout in rollouts]),
        included_N=torch.tensor(list(included)),
        old_logprobs_T=torch.from_numpy(log_pi_T),
        mu_logprobs_T=torch.from_numpy(np.concatenate([rollout.mu_logprobs for rollout in rollouts])),
    )
