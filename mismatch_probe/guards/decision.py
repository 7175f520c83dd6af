"""What the guards say about one step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from mismatch_probe.guards.actions import Action, parse_action, strongest_first


@dataclass(frozen=True)
class GuardEvent:
    """One firing. firing: which one of the incident, from 1. threshold: in the rule's own unit."""

    step: int
    guard: str
    rule: str
    metric: str
    value: float
    threshold: float
    firing: int
    actions: tuple[Action, ...]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """Strict JSON: a value that is not finite is its name, such as `nan`."""
        return {
            "step": self.step,
            "guard": self.guard,
            "rule": self.rule,
            "metric": self.metric,
            "value": self.value if math.isfinite(self.value) else str(self.value),
            "threshold": self.threshold if math.isfinite(self.threshold) else str(self.threshold),
            "firing": self.firing,
            "actions": [str(action) for action in self.actions],
            "sentence": self.sentence,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls(
            **{
                **record,
                "value": float(record["value"]),
                "threshold": float(record["threshold"]),
                "actions": tuple(map(parse_action, record["actions"])),
            }
        )


@dataclass(frozen=True)
class StepFirings:
    """The firings of one step. missing: metrics that guards read and the step lacks; those were not judged."""

    step: int
    events: tuple[GuardEvent, ...] = ()
    missing: tuple[str, ...] = ()

    def followed_by(self, later: Self) -> Self:
        """With what was said later in the same step."""
        return replace(self, events=(*self.events, *later.events), missing=(*self.missing, *later.missing))

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the loop is to do: each action once, the strongest first."""
        return strongest_first(action for event in self.events for action in event.actions)
