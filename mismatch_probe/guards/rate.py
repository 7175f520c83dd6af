"""A learning rate that guards lowered with a rollback is raised again once the run is sound."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

RAISED_AFTER: Final = 10
"""Clean steps in a row, and as many before each further step up."""
STEP_UP: Final = 2.0
"""Less than what a guard on jumps of the rate allows."""


@dataclass
class Rate:
    """factor: the product of all that the schedule was multiplied by. ceiling: as far as it may be raised; never above
    the schedule. clean: steps in a row. was_raised: since it was lowered last.

    What was lowered without a rollback stays lowered: the rate itself was at fault. A rate that had to be lowered again
    after it was raised was too high, and is not raised as far any more.
    """

    factor: float = 1.0
    ceiling: float = 1.0
    clean: int = 0
    was_raised: bool = False

    def lower(self, by: float, *, rolls_back: bool) -> None:
        if self.was_raised:
            self.ceiling = min(self.ceiling, self.factor / STEP_UP)
        self.factor *= by
        if not rolls_back:
            self.ceiling *= by
        self.ceiling = max(self.ceiling, self.factor)
        self.clean, self.was_raised = 0, False

    def raise_after(self, *, is_clean: bool) -> float:
        """Takes a step in that did not lower it; what it is multiplied by."""
        self.clean = self.clean + 1 if is_clean else 0
        if self.clean < RAISED_AFTER or self.factor >= self.ceiling:
            return 1.0
        by = min(STEP_UP, self.ceiling / self.factor)
        self.factor, self.clean, self.was_raised = self.factor * by, 0, True
        return by

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a factor is no number above 0, or a count no whole number.
        """
        factors = (state["factor"], state["ceiling"])
        if any(type(factor) not in (int, float) or not 0 < factor < math.inf for factor in factors):
            raise ValueError("a factor of the learning rate is no number above 0")
        if type(state["clean"]) is not int or type(state["was_raised"]) is not bool:
            raise ValueError("a count of clean steps is no whole number, or was_raised neither true nor false")
        self.factor, self.ceiling = state["factor"], state["ceiling"]
        self.clean, self.was_raised = state["clean"], state["was_raised"]
