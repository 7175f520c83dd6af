"""What a guard may ask of the training loop, written `warn`, `lower_learning_rate(0.5)` or `raise_precision(train)`."""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

from mismatch_probe.config.model import CorrectionName, PairSide
from mismatch_probe.errors import did_you_mean

_CORRECTIONS: Final[tuple[str, ...]] = get_args(CorrectionName)
_DEFAULT_FACTOR = 0.5
_TO_LEVEL = "level"
_LEAST_FACTOR = 0.01
_DIGITS = 2
OF_RATE = {"learning_rate": 1.0, "policy_shift_k3": 0.5}
"""Metrics that follow the learning rate: the power that turns their ratio into that of the rate."""


class ActionKind(StrEnum):
    """Weakest first.

    log: the event is recorded. warn: and shown. tighten_sequences: sequences with the largest abs(S) are dropped, their
    bound multiplied by the factor. leave_out: responses whose reward is no number leave the loss; a loop that cannot do
    that is asked to skip the update. skip_update: this step's update is not applied. lower_learning_rate: multiplied by
    the factor from now on, or brought back to the level that the guard held it against. switch_correction: to the named
    one. resync: weights are sent to the engine again, and probed. raise_precision: of one side. rollback: to the last
    good checkpoint. stop: exit code 1 with a diagnosis.
    """

    LOG = "log"
    WARN = "warn"
    TIGHTEN_SEQUENCES = "tighten_sequences"
    LEAVE_OUT = "leave_out"
    SKIP_UPDATE = "skip_update"
    LOWER_LEARNING_RATE = "lower_learning_rate"
    SWITCH_CORRECTION = "switch_correction"
    RESYNC = "resync"
    RAISE_PRECISION = "raise_precision"
    ROLLBACK = "rollback"
    STOP = "stop"

    @property
    def strength(self) -> int:
        return list(ActionKind).index(self)

    def is_possible(self, can: Collection["ActionKind"]) -> bool:
        """Whether a loop that can do these can do it, or what stands for it."""
        return self in can or (self is ActionKind.LEAVE_OUT and ActionKind.SKIP_UPDATE in can)

    @property
    def argument(self) -> Literal["factor", "to", "side"] | None:
        """The field of `Action` that this kind takes."""
        match self:
            case ActionKind.TIGHTEN_SEQUENCES | ActionKind.LOWER_LEARNING_RATE:
                return "factor"
            case ActionKind.SWITCH_CORRECTION:
                return "to"
            case ActionKind.RAISE_PRECISION:
                return "side"
            case _:
                return None


@dataclass(frozen=True)
class Action:
    """One action; only the argument its kind takes is set."""

    kind: ActionKind
    factor: float | None = None
    to: str | None = None
    side: PairSide | None = None
    to_level: bool = False
    """In place of a factor; at a firing it becomes the factor that brings the metric back to its level before."""

    def against(self, metric: str, value: float, level: float | None) -> "Action":
        """What it is at a firing on a metric's `value`, after its `level` before: a factor of two digits, at least a
        hundredth.
        """
        if not self.to_level:
            return self
        if level is None or not 0 < level < value < math.inf:
            return Action(self.kind, factor=_DEFAULT_FACTOR)
        factor = max(_LEAST_FACTOR, (level / value) ** OF_RATE[metric.rpartition("/")[2]])
        return Action(self.kind, factor=float(f"{factor:.{_DIGITS}g}"))

    def __str__(self) -> str:
        if self.to_level:
            return f"{self.kind.value}({_TO_LEVEL})"
        argument = None if self.kind.argument is None else getattr(self, self.kind.argument)
        return self.kind.value if argument is None else f"{self.kind.value}({argument})"


def parse_action(text: object) -> Action:
    """`NAME` or `NAME(ARGUMENT)`; a factor left out is 0.5, and `lower_learning_rate(level)` has none yet.

    Raises:
        ValueError: the name is unknown, or the argument is missing, out of range, or not taken.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is no action; write "warn" or "lower_learning_rate(0.5)"')
    name, argument = match[1], match[2]
    if name not in list(ActionKind):
        raise ValueError(f"action {name!r} is unknown{did_you_mean(name, ActionKind)}")
    kind = ActionKind(name)
    if kind is ActionKind.LOWER_LEARNING_RATE and argument == _TO_LEVEL:
        return Action(kind, to_level=True)
    if kind.argument == "factor":
        return Action(kind, factor=_factor_of_action(name, argument))
    if kind.argument == "to":
        if argument not in _CORRECTIONS:
            raise ValueError(f"{name} says to which correction: one of {', '.join(_CORRECTIONS)}")
        return Action(kind, to=argument)
    if kind.argument == "side":
        if argument not in ("train", "infer"):
            raise ValueError(f'{name} says of which side; write "{name}(train)" or "{name}(infer)"')
        return Action(kind, side="train" if argument == "train" else "infer")
    if argument is not None:
        raise ValueError(f'{name} takes no argument; write "{name}"')
    return Action(kind)


def strongest_first(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Each action once, the strongest first; of several factors the smallest, of several corrections the first."""
    strongest: dict[tuple[ActionKind, PairSide | None], Action] = {}
    for action in actions:
        key = action.kind, action.side
        rival = strongest.get(key)
        if rival is None or (action.factor or 1.0) < (rival.factor or 1.0):
            strongest[key] = action
    return tuple(sorted(strongest.values(), key=lambda action: action.kind.strength, reverse=True))


def _factor_of_action(name: str, argument: str | None) -> float:
    if argument is None:
        return _DEFAULT_FACTOR
    try:
        factor = float(argument)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1:
        raise ValueError(f'the factor of {name} lies between 0 and 1; write "{name}(0.5)"')
    return factor


LOG = Action(ActionKind.LOG)
WARN = Action(ActionKind.WARN)
SKIP = Action(ActionKind.SKIP_UPDATE)
STOP = Action(ActionKind.STOP)
