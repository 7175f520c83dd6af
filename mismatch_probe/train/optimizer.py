"""What an update changes: the policy and its critic, each by an optimizer of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mismatch_probe.config.train import LossScaleSettings, OptimizerSettings
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gather, world_size
from mismatch_probe.train.learner import Learner, PolicyScores
from mismatch_probe.train.objectives.losses import Update, value_loss
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout, gathered_tokens, micro_batches
from mismatch_probe.train.sharded import ValueModel

_SMALLEST_SCALE: Final = 2.0**-14
_LARGEST_SCALE: Final = 2.0**24
"""That of apex. Gradients of zero never overflow: where all rewards are equal a scale would grow without end."""


@dataclass
class LossScale:
    """Dynamic loss scaling [Micikevicius et al. 2018, arXiv 1710.03740, section 3.2].

    The overflow that moves it is read off the norm over all ranks, so every rank has the same scale.
    """

    value: float
    growth_interval: int
    clean_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Halve after non-finite gradients; double after `growth_interval` clean steps in a row, up to 2^24."""
        if overflow:
            self.value, self.clean_steps = max(self.value / 2, _SMALLEST_SCALE), 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.value, self.clean_steps = max(self.value, min(self.value * 2, _LARGEST_SCALE)), 0


class Optimizer:
    """What turns accumulated gradients into a step. `scale` is None where the dtype needs none."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        settings: OptimizerSettings,
        *,
        steps: int,
        scale: LossScaleSettings | None,
    ) -> None:
        self._parameters = parameters
        self._settings = settings
        self._num_steps = steps
        self._overflows_in_a_row = 0
        self._norm = 0.0
        self.adamw = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter in parameters:
            self.adamw.state[parameter] = _no_moments(parameter)
        self.loss_scale = None if scale is None else LossScale(scale.initial, scale.growth_interval)

    @property
    def overflows_in_a_row(self) -> int:
        """Steps up to now whose gradients were not finite, without one between that were."""
        return self._overflows_in_a_row

    @property
    def has_gradient(self) -> bool:
        """Whether the gradients' norm is finite and more than 0. Where it is 0 AdamW would move the weights by its
        momentum alone, step after step, although nothing was learnt.
        """
        return math.isfinite(self._norm) and self._norm > 0

    @property
    def has_nonfinite_gradient(self) -> bool:
        """Whether the gradients' norm is not finite and no loss scale is there to be lowered for it."""
        return self.loss_scale is None and not math.isfinite(self._norm)

    def learning_rate(self, step: int) -> float:
        """The scheduled rate of a step, counted from 1."""
        return self._settings.learning_rate * _share_of_rate(self._settings, self._num_steps, step - 1)

    @property
    def scale(self) -> float:
        """What a loss is multiplied by before its backward pass."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def unscale_and_clip(self) -> float:
        """Divide gradients by the loss scale, clip their norm over all ranks, and return it as it was before.

        A norm that is not finite is an overflow: the scale moves, and the gradients must not be applied.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        norm = get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._norm = float(norm)
        overflow = not math.isfinite(self._norm)
        if not overflow:
            clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, norm)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=overflow)
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        return self._norm

    def step(self, learning_rate: float) -> None:
        """Apply the gradients at a rate."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad()

    def discard(self) -> None:
        """Forget the gradients."""
        self.adamw.zero_grad()

    def small_state(self) -> dict[str, Any]:
        """All but AdamW's moments, as JSON values."""
        scale = None if self.loss_scale is None else vars(self.loss_scale).copy()
        return {"overflows_in_a_row": self._overflows_in_a_row, "loss_scale": scale}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `small_state` gave; a scale is kept where this dtype has one."""
        self._overflows_in_a_row = state["overflows_in_a_row"]
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale = LossScale(**state["loss_scale"])


def _no_moments(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state before any step; where it has none, PyTorch takes a step to make one for a checkpoint."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _share_of_rate(settings: OptimizerSettings, steps: int, step: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the highest."""
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2


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
        rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
        self.model.expect(float(np.mean(rewards)) if rewards else 0.0)
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
        return sum(gather([losses]))


_PREFIX: Final = {"policy": "optim", "critic": "critic"}


@dataclass(frozen=True)
class TrainedNetwork:
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
        self.trained = {"policy": TrainedNetwork(policy.module, optimizer)}
        if critic is not None:
            self.trained["critic"] = TrainedNetwork(critic.model.module, critic.optimizer)

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> PolicyScores:
        """The responses' log-probs and, with a critic, values as they are before the update."""
        scores = self._learner.score(rollouts, keep_graph=keep_graph)
        if self._critic is None:
            return scores
        values_T, graph = self._critic.score(rollouts, keep_graph=keep_graph)
        return replace(scores, values_T=values_T, values_graph=graph)

    def accumulate(
        self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], scores: PolicyScores
    ) -> Metrics:
        """Gradients of the update's losses over `rows`, unscaled and clipped; what they were, losses before scaling."""
        optimizer = self.trained["policy"].optimizer
        sums = self._learner.accumulate(update, rollouts, rows, scores, optimizer.scale)
        metrics = {"optim/loss": sums.loss, "optim/clipped_share": sums.clipped_share}
        if self._critic is not None:
            metrics["critic/value_loss"] = self._critic.accumulate(update, rollouts, rows, scores.values_graph)
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
