"""Reaching into the parts of a run: one method or attribute of a real object replaced, from one step on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mismatch_probe.train.optimizer import Optimizer
from mismatch_probe.train.parts import TrainingParts


@dataclass
class Now:
    """The step that is under way; a fault is there from step `onset` on, before step `end` where it ends."""

    onset: int
    end: int | None = None
    step: int = 1

    @property
    def faulty(self) -> bool:
        return self.step >= self.onset and (self.end is None or self.step < self.end)


Inject = Callable[[TrainingParts, Now], None]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set an attribute to what `make` makes of the one that is there."""
    setattr(owner, name, make(getattr(owner, name)))


def optimizer_of(parts: TrainingParts) -> Optimizer:
    """The policy's."""
    return parts.updater.trained["policy"].optimizer


@contextmanager
def swapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """As `replaced`, until the block ends."""
    real = getattr(owner, name)
    replaced(owner, name, make)
    try:
        yield
    finally:
        setattr(owner, name, real)
