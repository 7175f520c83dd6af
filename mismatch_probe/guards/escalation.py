"""When a broken rule becomes a firing, and which one in a row."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mismatch_probe.guards.rules.base import Breach


@dataclass
class Escalation:
    """Hysteresis: `patience` broken steps in a row make a firing, `clear_after` clean ones close the incident.

    firings: how often the guard fired since the incident began. broken_since: the first step that the breach rests on
    which has lasted up to now.
    """

    patience: int
    clear_after: int
    firings: int = 0
    broken_in_a_row: int = 0
    clean_in_a_row: int = 0
    broken_since: int | None = None

    def count(self, breach: Breach | None, step: int) -> bool:
        """Takes a step in; whether the guard fires."""
        if breach is None:
            self.broken_in_a_row, self.broken_since = 0, None
            self.clean_in_a_row += 1
            if self.clean_in_a_row >= self.clear_after:
                self.firings = 0
            return False
        self.clean_in_a_row = 0
        self.broken_in_a_row += 1
        if self.broken_since is None:
            self.broken_since = max(1, step + 1 - breach.steps)
        if self.broken_in_a_row < self.patience:
            return False
        self.fire()
        return True

    def fire(self) -> None:
        self.broken_in_a_row = self.clean_in_a_row = 0
        self.firings += 1

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("patience", "clear_after")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a count is no whole number.
        """
        counts = {name: count for name, count in state.items() if (name, count) != ("broken_since", None)}
        if any(type(count) is not int for count in counts.values()):
            raise ValueError("a count of a guard's firings is no whole number")
        self.firings = state["firings"]
        self.broken_in_a_row = state["broken_in_a_row"]
        self.clean_in_a_row = state["clean_in_a_row"]
        self.broken_since = state["broken_since"]
