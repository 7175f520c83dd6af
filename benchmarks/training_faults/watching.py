"""What is seen of a run from inside: what its steps started with, and its updates."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from benchmarks.training_faults.injection import Now, optimizer_of, replaced
from mismatch_probe.train.objectives.losses import Update
from mismatch_probe.train.parts import TrainingParts


class Starts:
    """What each step started with: digests of the weights and of AdamW's moments."""

    def __init__(self) -> None:
        self.weights: dict[int, str] = {}
        self.moments: dict[int, str] = {}

    def record(self, parts: TrainingParts, now: Now) -> None:
        """A step starts by sending weights; what it sends first is what it holds."""

        def make(send: Callable[..., None]) -> Callable[..., None]:
            def after_a_look(**how: bool) -> None:
                if now.step not in self.weights:
                    self.weights[now.step] = weights_digest(dict(parts.policy.weights()))
                    self.moments[now.step] = _moments_digest(optimizer_of(parts).adamw)
                send(**how)

            return after_a_look

        replaced(parts.sync, "send", make)


class Updates:
    """Every update that gradients were computed for, by step."""

    def __init__(self) -> None:
        self._updates_found: dict[int, list[Update]] = {}

    def of(self, step: int) -> list[Update]:
        return self._updates_found[step]

    def record(self, parts: TrainingParts, now: Now) -> None:
        def make(accumulate: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(update: Update, *rest: Any) -> Any:
                self._updates_found.setdefault(now.step, []).append(update)
                return accumulate(update, *rest)

            return recorded

        replaced(parts.updater, "accumulate", make)


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    return digest_of(part for name in sorted(weights) for part in (name, weights[name]))


def _moments_digest(adamw: torch.optim.AdamW) -> str:
    states = [adamw.state.get(parameter, {}) for parameter in adamw.param_groups[0]["params"]]
    return digest_of(part for state in states for name in sorted(state) for part in (name, _local(state[name])))


def digest_of(parts: Iterable[str | torch.Tensor | npt.NDArray[Any]]) -> str:
    """SHA-256 of texts and of numbers' bits."""
    digest = hashlib.sha256()
    for part in parts:
        array = part.detach().contiguous().numpy() if isinstance(part, torch.Tensor) else part
        digest.update(array.encode() if isinstance(array, str) else array.tobytes())
    return digest.hexdigest()


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
