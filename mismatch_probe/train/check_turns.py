"""In which steps the weights are compared and probed, where that may take only a share of a run's time."""

from dataclasses import dataclass


@dataclass
class CheckTurns:
    """Due in every step without a bound, and else once the last check's seconds are at most `max_cost` of those that
    have passed since its step began. Nothing of it is saved: the first step of a resumed run is checked.
    """

    max_cost: float | None
    _check_seconds: float = 0.0
    _passed_seconds: float = 0.0

    def is_due(self, *, in_doubt: bool) -> bool:
        """in_doubt: a guard doubts the steps before, so that this one is checked whatever it costs."""
        if self.max_cost is None or in_doubt:
            return True
        return self._check_seconds <= self.max_cost * self._passed_seconds

    def took(self, step_seconds: float, check_seconds: float | None) -> None:
        """Takes in a step; `check_seconds` is None where it was not checked."""
        if check_seconds is not None:
            self._check_seconds, self._passed_seconds = check_seconds, 0.0
        self._passed_seconds += step_seconds
