"""Which checkpoints a rollback may go back to: those after which the run went on undoubted for long enough."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from mismatch_probe.guards.rules.base import GuardSettings


@dataclass
class GoodSteps:
    """Takes in each step, whether it was clean: no guard gave its update up, or doubts it and may roll back.

    A checkpoint is good once `waits` clean steps in a row came after it: as many as the slowest guard that may roll
    back needs to ask for it. until: the last step whose checkpoint is good, and so is every one before. clean: steps in
    a row. What a rollback went back to is not gone back to again before later steps were good.
    """

    waits: int
    until: int | None = None
    clean: int = 0

    @classmethod
    def under(cls, guards: Iterable[GuardSettings]) -> Self:
        """What these guards need; nothing where none of them rolls back."""
        return cls(max((guard.steps_to_roll_back or 0 for guard in guards), default=0))

    def count(self, step: int, *, is_clean: bool) -> None:
        """The weights that the first step begins with count as good."""
        if self.until is None:
            self.until = step - 1
        self.clean = self.clean + 1 if is_clean else 0
        if self.clean >= self.waits:
            self.until = max(self.until, step - self.waits)

    def doubt(self) -> None:
        """A step that was counted as clean is not, by what came later in it."""
        self.clean = 0

    def went_back(self, step: int) -> None:
        """A rollback went to the checkpoint of `step`; the next one goes further, unless later steps become good."""
        self.until = step - 1
        self.clean = 0

    def last_before(self, doubted_since: int | None) -> int:
        """The newest step whose checkpoint is good while the steps from `doubted_since` on are in doubt: a step is the
        first to judge the checkpoint of the one before.
        """
        assert self.until is not None
        return self.until if doubted_since is None else min(self.until, doubted_since - 2)

    def state(self) -> dict[str, Any]:
        return {"until": self.until, "clean": self.clean}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.until, self.clean = state["until"], state["clean"]
