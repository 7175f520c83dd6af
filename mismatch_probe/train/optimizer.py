"""AdamW on FP32 master weights, a schedule, clipping, and the dynamic loss scale of FP16."""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mismatch_probe.config.train import LossScaleSettings, OptimizerSettings

_SMALLEST_SCALE: Final = 2.0**-14


@dataclass
class LossScale:
    """Dynamic loss scaling [Micikevicius et al. 2018, arXiv 1710.03740, section 3.2].

    The overflow that moves it is read off the norm over all ranks, so every rank has the same scale.
    """

    value: float
    growth_interval: int
    clean_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Halve after non-finite gradients; double after `growth_interval` clean steps in a row."""
        if overflow:
            self.value, self.clean_steps = max(self.value / 2, _SMALLEST_SCALE), 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.value, self.clean_steps = self.value * 2, 0


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
    done = min(1.0, (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
