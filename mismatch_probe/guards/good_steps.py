"""Which checkpoints a rollback may go back to: those after which the run went on undoubted for long enough."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mismatch_probe.guards.rules.base import GuardSettings


@dataclass
class GoodSteps:
    """Takes in each step, whether it was clean: no guard gave its update up, or doubts it and may roll back.

    A checkpoint is good once `waits` clean steps in a row came after it: as many as the slowest guard that may roll
    back needs to ask for it. begin: the step whose weights the run began with, which count as good. until: the last
    step whose checkpoint is good, and so is every one before. clean: the newest clean steps, between which only such
    lie that were not judged. What a rollback went back to is not gone back to again before later steps were good.
    """

    waits: int
    begin: int | None = None
    until: int = 0
    clean: list[int] = field(default_factory=list)

    @classmethod
    def under(cls, guards: Iterable[GuardSettings]) -> Self:
        """What these guards need; nothing where none of them rolls back."""
        return cls(max((guard.steps_to_roll_back or 0 for guard in guards), default=0))

    def count(self, step: int, *, is_clean: bool, is_judged: bool = True) -> None:
        """is_judged: the step gave all that the guards which may roll back read; one that did not is neither clean nor
        not.
        """
        if self.begin is None:
            self.begin = self.until = step - 1
        if not is_clean:
            self.clean = []
        elif is_judged:
            self.clean = [*self.clean, step][-max(1, self.waits) :]
        if not self.waits:
            self.until = max(self.until, step)
        elif len(self.clean) == self.waits:
            self.until = max(self.until, self.clean[0] - 1)

    def doubt(self) -> None:
        """A step that was counted as clean is not, by what came later in it."""
        self.clean = []

    def went_back(self, step: int) -> None:
        """A rollback went to the checkpoint of `step`; the next one goes further, unless later steps become good."""
        self.begin = step if self.begin is None else min(self.begin, step)
        self.until = max(self.begin, step - 1)
        self.clean = []

    def last_before(self, doubted_since: int | None) -> int:
        """The newest step whose checkpoint is good while the steps from `doubted_since` on are in doubt: a step is the
        first to judge the checkpoint of the one before.
        """
        if self.begin is None or doubted_since is None:
            return self.until
        return max(self.begin, min(self.until, doubted_since - 2))

    def state(self) -> dict[str, Any]:
        return {"begin": self.begin, "until": self.until, "clean": list(self.clean)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a step is no whole number.
        """
        steps = [state["until"], *state["clean"], *([] if state["begin"] is None else [state["begin"]])]
        if any(type(step) is not int for step in steps):
            raise ValueError("a good step is no whole number")
        self.begin, self.until, self.clean = state["begin"], state["until"], list(state["clean"])
