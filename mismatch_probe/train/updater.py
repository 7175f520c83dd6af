"""What an update changes: the policy and, where the objective has one, its critic, each by an optimizer of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from mismatch_probe.guards.sums import Metrics
from mismatch_probe.train.critic import Critic
from mismatch_probe.train.learner import Learner, Scored
from mismatch_probe.train.objectives.losses import Update
from mismatch_probe.train.optimizer import Optimizer
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout

_PREFIX: Final = {"policy": "optim", "critic": "critic"}


@dataclass(frozen=True)
class Trained:
    """A network and what trains it."""

    module: torch.nn.Module
    optimizer: Optimizer


class Updater:
    """Policy and critic learn from the same responses, and what a guard gives up is given up by both.

    Either's gradients that are not finite are forgotten alone.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer, critic: Critic | None, micro_batch_tokens: int) -> None:
        self._learner = Learner(policy, micro_batch_tokens)
        self._critic = critic
        self.trained = {"policy": Trained(policy.module, optimizer)}
        if critic is not None:
            self.trained["critic"] = Trained(critic.model.module, critic.optimizer)

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> Scored:
        """The responses' log-probs and, with a critic, values as they are before the update."""
        scored = self._learner.score(rollouts, keep_graph=keep_graph)
        if self._critic is None:
            return scored
        values_T, graph = self._critic.score(rollouts, keep_graph=keep_graph)
        return replace(scored, values_T=values_T, values_graph=graph)

    def accumulate(self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], scored: Scored) -> Metrics:
        """Gradients of the update's losses over `rows`, unscaled and clipped; what they were, losses before scaling."""
        optimizer = self.trained["policy"].optimizer
        accumulated = self._learner.accumulate(update, rollouts, rows, scored, optimizer.scale)
        metrics = {"optim/loss": accumulated.loss, "optim/clipped_share": accumulated.clipped_share}
        if self._critic is not None:
            metrics["critic/value_loss"] = self._critic.accumulate(update, rollouts, rows, scored.values_graph)
        for name, part in self.trained.items():
            metrics[f"{_PREFIX[name]}/grad_norm"] = part.optimizer.unscale_and_clip()
            metrics[f"{_PREFIX[name]}/loss_scale"] = part.optimizer.scale
            metrics[f"{_PREFIX[name]}/overflow"] = float(part.optimizer.overflows_in_a_row > 0)
            metrics[f"{_PREFIX[name]}/overflows_in_a_row"] = float(part.optimizer.overflows_in_a_row)
        nonfinite = [part.optimizer.has_nonfinite_gradient for part in self.trained.values()]
        return metrics | {"optim/nonfinite_gradients": float(sum(nonfinite))}

    def learning_rates(self, step: int, factor: float) -> Metrics:
        """`factor` times the scheduled rate of a step, counted from 1."""
        return {
            f"{_PREFIX[name]}/learning_rate": factor * part.optimizer.learning_rate(step)
            for name, part in self.trained.items()
        }

    def step(self, step: int, factor: float) -> None:
        """Apply the gradients that are finite and not all 0 at `factor` times the step's rate; forget the others."""
        for part in self.trained.values():
            if part.optimizer.has_gradient:
                part.optimizer.step(factor * part.optimizer.learning_rate(step))
            else:
                part.optimizer.discard()

    def discard(self) -> None:
        """Forget all gradients."""
        for part in self.trained.values():
            part.optimizer.discard()

    def small_state(self) -> dict[str, Any]:
        """All but weights and moments, as JSON values."""
        return {name: part.optimizer.small_state() for name, part in self.trained.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `small_state` gave."""
        for name, part in self.trained.items():
            part.optimizer.restore(state[name])
