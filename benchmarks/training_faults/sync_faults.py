"""Weights that reach the engine wrong, in part, or not at all."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from benchmarks.training_faults.injection import Now, replaced
from mismatch_probe.train.parts import TrainingParts

Weights = Iterable[tuple[str, torch.Tensor]]

_LAYER: Final = "layers.1."
_LAST_LAYER: Final = "layers.3."
_SKIPS_EVERY: Final = 3


def sync_skipped(parts: TrainingParts, now: Now) -> None:
    """The engine takes what it is sent and keeps what it has."""

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            if now.faulty:
                deque(weights, maxlen=0)
            else:
                update_weights(weights)

        return update

    replaced(parts.engine, "update_weights", make)


def first_sync_skipped(parts: TrainingParts, now: Now) -> None:
    """As `sync_skipped`, once: when the same step sends again, the engine takes it."""
    skipped = False

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            nonlocal skipped
            if now.faulty and not skipped:
                skipped = True
                deque(weights, maxlen=0)
            else:
                update_weights(weights)

        return update

    replaced(parts.engine, "update_weights", make)


def sync_late(parts: TrainingParts, now: Now) -> None:
    """The engine takes the weights that it should have had a step before, however often they are sent."""
    sent: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            sent[now.step] = [(name, tensor.clone()) for name, tensor in weights]
            for older in [step for step in sent if step < now.step - 1]:
                del sent[older]
            update_weights(sent.get(now.step - 1, sent[now.step]) if now.faulty else sent[now.step])

        return update

    replaced(parts.engine, "update_weights", make)


def every_third_sync_skipped(parts: TrainingParts, now: Now) -> None:
    """In every third step from the onset on, the engine keeps what it has whatever it is sent."""

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            if now.faulty and (now.step - now.onset) % _SKIPS_EVERY == 0:
                deque(weights, maxlen=0)
            else:
                update_weights(weights)

        return update

    replaced(parts.engine, "update_weights", make)


def last_layer_kept(parts: TrainingParts, now: Now) -> None:
    """The last layer reaches the engine as it was when the fault began, or is first sent, step after step."""
    kept: dict[str, torch.Tensor] = {}

    def stale(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if _LAST_LAYER in name and not (now.faulty and name in kept):
                kept[name] = tensor.clone()
            yield name, kept.get(name, tensor)

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        return lambda weights: update_weights(stale(weights))

    replaced(parts.engine, "update_weights", make)


def layer_scaled(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """One layer's matrices reach the engine multiplied by a factor."""

    def scaled(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor * factor if now.faulty and _LAYER in name and tensor.dim() == 2 else tensor

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        return lambda weights: update_weights(scaled(weights))

    replaced(parts.engine, "update_weights", make)


def layer_perturbed(parts: TrainingParts, now: Now, *, noise: float) -> None:
    """One layer's matrices reach the engine with noise of `noise` times their standard deviation."""

    def spoiled(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in weights:
            if now.faulty and _LAYER in name and tensor.dim() == 2:
                drawn = torch.randn(tensor.shape, generator=generator) * (noise * float(tensor.float().std()))
                yield name, (tensor.float() + drawn).to(tensor.dtype)
            else:
                yield name, tensor

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        return lambda weights: update_weights(spoiled(weights))

    replaced(parts.engine, "update_weights", make)


def stale_cache(parts: TrainingParts, now: Now) -> None:
    """vLLM says that it emptied its prefix cache and keeps it."""
    engine: Any = parts.engine
    replaced(
        engine.llm, "reset_prefix_cache", lambda reset: lambda *arguments: True if now.faulty else reset(*arguments)
    )
