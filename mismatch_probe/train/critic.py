"""The critic: values of a step's responses, and how it learns from what was earned."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gathered, world_size
from mismatch_probe.train.micro_batches import gathered_tokens, micro_batches
from mismatch_probe.train.objectives.losses import Update
from mismatch_probe.train.objectives.values import value_loss
from mismatch_probe.train.optimizer import Optimizer
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.value_model import ValueModel


class Critic:
    """Values responses and accumulates gradients; every rank must call the same methods with the same responses."""

    def __init__(self, model: ValueModel, optimizer: Optimizer, micro_batch_tokens: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> tuple[Floats, torch.Tensor | None]:
        """Values [T] as they are now; with their graph where it is to be kept and one micro-batch holds them all.

        Until a first update they are the mean reward of the responses at hand.
        """
        earned = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
        self.model.expect(float(np.mean(earned)) if earned else 0.0)
        batches = micro_batches(rollouts, range(len(rollouts)), self._micro_batch_tokens)
        with_graph = keep_graph and len(batches) == 1
        with torch.set_grad_enabled(with_graph), self.model.computing():
            passes = [self.model.values(batch.of(rollouts)) for batch in batches]
        return gathered_tokens(rollouts, batches, passes), passes[0] if with_graph else None

    def accumulate(
        self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], graph: torch.Tensor | None
    ) -> float:
        """Add the gradient of the update's value loss over `rows`, scaled; returns the loss as it is without scaling.

        FSDP averages over ranks, so each rank's share of the sum counts as often as there are ranks.
        """
        losses = 0.0
        with self.model.computing():
            for batch in micro_batches(rollouts, rows, self._micro_batch_tokens):
                values_T = self.model.values(batch.of(rollouts)) if graph is None else graph
                if batch.is_filler:
                    (values_T.sum() * 0).backward()
                    continue
                loss = value_loss(update, values_T, batch.rows)
                (loss * (self.optimizer.scale * world_size())).backward()
                losses += float(loss.detach())
        return sum(gathered([losses]))
