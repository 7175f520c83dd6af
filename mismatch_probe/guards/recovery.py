"""What a rollback may go back to, when it would not help, and when a lowered rate is raised again."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Self

from mismatch_probe.guards.actions import SKIP, STOP, WARN
from mismatch_probe.guards.diagnosis import GuardEvent, Window, engine_follows
from mismatch_probe.guards.rewards import REWARD, reward_jump
from mismatch_probe.guards.rules.base import GuardSettings, Values, write_value


@dataclass
class GoodSteps:
    """Takes in each step, whether it was clean: no guard gave its update up, or doubts it and may roll back.

    A checkpoint is good once `waits` clean steps in a row came after it: as many as the slowest guard that may roll
    back needs to ask for it.
    """

    waits: int
    begin: int | None = None
    """The step whose weights the run began with, which count as good."""
    until: int = 0
    """The last step whose checkpoint is good, and so is every one before."""
    clean: list[int] = field(default_factory=list)
    """The newest clean steps, between which only such lie that were not judged. What a rollback went back to is not
    gone back to again before later steps were good.
    """

    @classmethod
    def needed_by(cls, guards: Iterable[GuardSettings]) -> Self:
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


RAISED_AFTER: Final = 10
"""Clean steps in a row, and as many before each further step up."""
STEP_UP: Final = 2.0
"""Less than what a guard on jumps of the rate allows."""


@dataclass
class Rate:
    """What was lowered without a rollback stays lowered: the rate itself was at fault. A rate that had to be lowered
    again after it was raised was too high, and is not raised as far any more; nor is one at which an update moved the
    policy too far before the rollback.
    """

    factor: float = 1.0
    """The product of all that the schedule was multiplied by."""
    ceiling: float = 1.0
    """The most that it may be raised to; never above the schedule."""
    clean: int = 0
    """Clean steps in a row."""
    was_raised: bool = False
    """Whether it was raised since it was lowered last."""

    def lower(self, by: float, *, rolls_back: bool, bearable: float = 1.0) -> None:
        """bearable: the share of the rate so far that no update showed to be too high, as `bearable_rate` gives it."""
        if bearable < 1:
            self.ceiling = min(self.ceiling, self.factor * bearable)
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
            OverflowError: a factor is larger than any float.
        """
        factors = [state["factor"], state["ceiling"]]
        if any(type(factor) not in (int, float) or not 0 < float(factor) < math.inf for factor in factors):
            raise ValueError("a factor of the learning rate is no number above 0")
        if type(state["clean"]) is not int or type(state["was_raised"]) is not bool:
            raise ValueError("a count of clean steps is no whole number, or was_raised neither true nor false")
        self.factor, self.ceiling = map(float, factors)
        self.clean, self.was_raised = state["clean"], state["was_raised"]


_SHIFT: Final = "update/policy_shift_k3"
_RATE: Final = "optim/learning_rate"
_ORDINARY_NATS: Final = 0.005
"""Of an update: a tenth of what is too large."""
_SMALL_SHIFT_NATS: Final = 1e-3
_SHIFT_GROWN: Final = 10.0
_TOO_LARGE_NATS: Final = 0.05
"""Of an update: PPO codes aim at 0.01 to 0.05."""
_ENTROPY_GROWN: Final = 2.0
_MISMATCH_GROWN: Final = 10.0


def bearable_rate(window: Window, since: int) -> float:
    """The share of the learning rate at which the first update after step `since` that moved the policy too far would
    have been an ordinary one; 1 where none did. The KL of an update grows with the square of its rate.
    """
    shifts = (values.get(_SHIFT, 0.0) for step, values in sorted(window.history.items()) if step > since)
    shift = next((shift for shift in shifts if shift > _TOO_LARGE_NATS), None)
    return 1.0 if shift is None else math.sqrt(_ORDINARY_NATS / shift)


def restrain_event(event: GuardEvent, window: Window) -> GuardEvent:
    """The firing of a guard that `needs_update`, asking for a warning alone, or for a skipped update, where no update
    made the breach; else as it is.

    window: the steps up to that of the event.
    """
    if event.metric == _SHIFT and not engine_follows(window, event.value):
        why = "the engine took the same weights and is not as far from where it was, so it is the scores that changed"
        return replace(event, actions=(SKIP,), sentence=f"{event.sentence}; {why}")
    if event.metric == _RATE and (harmless := _harmless_rate(event, window)) is not None:
        return replace(event, actions=(WARN,), sentence=f"{event.sentence}; {harmless}")
    if event.metric == REWARD and (jump := reward_jump(window)) is not None and policy_is_calm(window, jump.first_step):
        why = f"no update near step {jump.first_step} moved the policy far, so the rewards or the problems changed"
        return replace(event, actions=(WARN,), sentence=f"{event.sentence}; {why}")
    return event


def _harmless_rate(event: GuardEvent, window: Window) -> str | None:
    """Why a rate that jumped is no reason to withhold updates, or to stop; None where it may be one.

    The size of the next update follows from the earlier one at the highest rate: it grows with the square of the rate.
    """
    shifts = [shift for shift in window.finite(_SHIFT) if shift > 0]
    if not shifts:
        return None
    skipped_steps = {each.step for each in window.events if each.metric == _RATE and SKIP in each.actions}
    sizes = [
        (window.history[step_before][_RATE], window.history[step][_SHIFT])
        for step_before, step in pairwise(sorted(window.history))
        if step_before not in skipped_steps
        and window.history[step_before].get(_RATE, 0.0) > 0
        and window.history[step].get(_SHIFT, 0.0) > 0
    ]
    rate, shift = max(sizes, default=(0.0, math.inf))
    size = shift * (event.value / rate) ** 2 if rate else math.inf
    if size <= _ORDINARY_NATS:
        return f"by the updates before, one at this rate moves the policy by about {write_value(size)} nats"
    if STOP in event.actions and max(shifts) <= _ORDINARY_NATS:
        return f"no update of the last steps moved the policy by more than {write_value(max(shifts))} nats"
    return None


def policy_is_calm(window: Window, start: int) -> bool:
    """Whether all that is known of the policy stayed where it was from step `start` on: how far an update moves it, its
    entropy, and the mismatch; False where neither the first nor the second is known. A policy is not calm where an
    update is too large, however large the others are.
    """
    steps_before, steps_after = (
        [values for step, values in sorted(window.history.items()) if (step < start) is is_earlier]
        for is_earlier in (True, False)
    )
    shifts, entropies, gaps = (
        (_finite(steps_before, name), _finite(steps_after, name))
        for name in (_SHIFT, "policy/entropy", "mismatch/kl_k3")
    )
    if not all(shifts) and not all(entropies):
        return False
    if all(shifts):
        usual = max(_SMALL_SHIFT_NATS, _SHIFT_GROWN * statistics.median(shifts[0]))
        if max(shifts[1]) > min(usual, _TOO_LARGE_NATS):
            return False
    if all(entropies):
        level_before, level = (statistics.median(values) for values in entropies)
        if not level_before / _ENTROPY_GROWN <= level <= level_before * _ENTROPY_GROWN:
            return False
    return not all(gaps) or statistics.median(gaps[1]) <= _MISMATCH_GROWN * statistics.median(gaps[0])


def _finite(steps: Iterable[Values], name: str) -> list[float]:
    return [values[name] for values in steps if math.isfinite(values.get(name, math.nan))]
