"""Updates that are too large, and numbers that leave their format."""

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.training_faults.injection import Now, optimizer_of, replaced
from mismatch_probe.train.parts import TrainingParts

_FAR_ABOVE_FP16: Final = 2.0**60
_ONE_NORM: Final = 1e6


def scheduled_rate(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """The schedule gives another rate, which the log shows."""

    def make(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * (factor if now.faulty else 1)

    replaced(optimizer_of(parts), "learning_rate", make)


def restarting_rate(parts: TrainingParts, now: Now, *, cycle: int) -> None:
    """A sound schedule: a cosine that begins anew every `cycle` steps."""

    def make(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * (1 + math.cos(math.pi * ((step - 1) % cycle) / cycle)) / 2

    replaced(optimizer_of(parts), "learning_rate", make)


def applied_rate(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """The optimizer steps at another rate than the log shows."""

    def make(step: Callable[[float], None]) -> Callable[[float], None]:
        return lambda rate: step(rate * (factor if now.faulty else 1))

    replaced(optimizer_of(parts), "step", make)


def loss_scale(parts: TrainingParts, now: Now) -> None:
    """The loss scale is set far above what FP16 holds, once; halving has to bring it back."""
    optimizer = optimizer_of(parts)

    def make(send: Callable[..., None]) -> Callable[..., None]:
        def first_raise(**how: bool) -> None:
            if now.step == now.onset and optimizer.loss_scale is not None:
                optimizer.loss_scale.value = _FAR_ABOVE_FP16
            send(**how)

        return first_raise

    replaced(parts.sync, "send", make)


def gradients_overflow(parts: TrainingParts, now: Now) -> None:
    """In every update a gradient is beyond its format."""
    optimizer = optimizer_of(parts)

    def make(unscale_and_clip: Callable[[], float]) -> Callable[[], float]:
        def overflown() -> float:
            if now.faulty:
                parameter: Any = next(
                    each_parameter for each_parameter in parts.policy.trainable() if each_parameter.grad is not None
                )
                parameter.grad.to_local().fill_(float("inf"))
            return unscale_and_clip()

        return overflown

    replaced(optimizer, "unscale_and_clip", make)


def activations(parts: TrainingParts, now: Now) -> None:
    """The training path's last norm multiplies by a million, past what FP16 holds, once the engine has its weights."""
    module: Any = parts.policy.module
    norm = module.model.model.norm.weight

    def make(sample: Callable[[int], Any]) -> Callable[[int], Any]:
        def then_grow(step: int) -> Any:
            if now.step == now.onset:
                with torch.no_grad():
                    norm.to_local().mul_(_ONE_NORM)
            return sample(step)

        return then_grow

    replaced(parts.rollouts, "sample", make)


def nothing(parts: TrainingParts, now: Now) -> None:
    """The settings are the fault."""


def gradients_changed(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """Gradients are multiplied: by what they were scaled with and are not divided by again, or by -1."""
    optimizer = optimizer_of(parts)

    def make(unscale_and_clip: Callable[[], float]) -> Callable[[], float]:
        def changed() -> float:
            if now.faulty:
                with torch.no_grad():
                    for parameter in parts.policy.trainable():
                        if parameter.grad is not None:
                            parameter.grad.mul_(factor)
            return unscale_and_clip()

        return changed

    replaced(optimizer, "unscale_and_clip", make)
