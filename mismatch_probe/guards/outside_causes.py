"""Breaches that no update of the policy can have made: what a rollback would not mend."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from mismatch_probe.guards.answers import SKIP, WARN
from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnosis import Window
from mismatch_probe.guards.rules.base import Values
from mismatch_probe.guards.window_evidence import engine_follows

_REWARD: Final = "reward/mean"
_SHIFT: Final = "update/policy_shift_k3"
_FEWEST_BEFORE: Final = 4
_FEWEST_AFTER: Final = 2
_EDGE: Final = 3
"""Steps on each side of a fall that say how much of it came at once."""
_ERRORS: Final = 4.0
_BESIDES_ERRORS: Final = 2.0
_SMALL_SHIFT_NATS: Final = 1e-3
_SHIFT_GROWN: Final = 10.0
_ENTROPY_GROWN: Final = 2.0
_MISMATCH_GROWN: Final = 10.0


@dataclass(frozen=True)
class RewardJump:
    """The mean reward went from one level to another between two steps. begun: the first step of the later level."""

    begun: int
    before: float
    after: float


def restrained(event: GuardEvent, window: Window) -> GuardEvent:
    """The firing of a guard that `needs_update`, asking for a warning alone, or for a skipped update, where no update
    made the breach; else as it is.

    window: the steps up to that of the event.
    """
    if event.metric == _SHIFT and not engine_follows(window, event.value):
        why = "the engine took the same weights and is not as far from where it was, so it is the scores that changed"
        return replace(event, actions=(SKIP,), sentence=f"{event.sentence}; {why}")
    if event.metric == _REWARD and (jump := reward_jump(window)) is not None and policy_is_calm(window, jump.begun):
        why = f"no update near step {jump.begun} moved the policy far, so the rewards or the problems changed"
        return replace(event, actions=(WARN,), sentence=f"{event.sentence}; {why}")
    return event


def reward_jump(window: Window) -> RewardJump | None:
    """Where the reward changed at once and is level before and after, by its standard errors; None where it did not.

    A fall step by step, as by updates that do harm, is none: between the steps right before and right after the largest
    change lies the whole of a jump, and a part of such a fall.
    """
    steps = [step for step in sorted(window.history) if math.isfinite(window.history[step].get(_REWARD, math.nan))]
    means = [window.history[step][_REWARD] for step in steps]
    errors = [window.history[step].get("reward/mean_error", math.nan) for step in steps]
    places = range(_FEWEST_BEFORE, len(steps) - _FEWEST_AFTER + 1)
    if not places:
        return None
    place = max(places, key=lambda place: abs(_change_at_once(means, place)))
    before, after = statistics.fmean(means[:place]), statistics.fmean(means[place:])
    at_once = _change_at_once(means, place)
    error = math.sqrt(
        _variance(means[:place], errors[:place]) / _EDGE
        + _variance(means[place:], errors[place:]) / min(_EDGE, len(means) - place)
    )
    besides = abs(after - before) - abs(at_once) if (after - before) * at_once > 0 else math.inf
    if abs(at_once) <= _ERRORS * error or besides > _BESIDES_ERRORS * error:
        return None
    return RewardJump(steps[place], before, after)


def policy_is_calm(window: Window, begun: int) -> bool:
    """Whether all that is known of the policy stayed where it was from step `begun` on: how far an update moves it, its
    entropy, and the mismatch; False where neither the first nor the second is known.
    """
    earlier, later = (
        [values for step, values in sorted(window.history.items()) if (step < begun) is is_earlier]
        for is_earlier in (True, False)
    )
    shifts, entropies, gaps = (
        (_finite(earlier, name), _finite(later, name)) for name in (_SHIFT, "policy/entropy", "mismatch/kl_k3")
    )
    if not all(shifts) and not all(entropies):
        return False
    if all(shifts) and max(shifts[1]) > max(_SMALL_SHIFT_NATS, _SHIFT_GROWN * statistics.median(shifts[0])):
        return False
    if all(entropies):
        usual, now = (statistics.median(values) for values in entropies)
        if not usual / _ENTROPY_GROWN <= now <= usual * _ENTROPY_GROWN:
            return False
    return not all(gaps) or statistics.median(gaps[1]) <= _MISMATCH_GROWN * statistics.median(gaps[0])


def _change_at_once(means: Sequence[float], place: int) -> float:
    """Between the steps right before the place and those right after."""
    return statistics.fmean(means[place:][:_EDGE]) - statistics.fmean(means[:place][-_EDGE:])


def _variance(values: Sequence[float], errors: Sequence[float]) -> float:
    """Of a step: its squared error where it is known, else from the differences of steps, which a slow change leaves
    alone.
    """
    given = [error**2 for error in errors if math.isfinite(error)]
    if given:
        return statistics.fmean(given)
    return statistics.fmean((two - one) ** 2 for one, two in pairwise(values)) / 2


def _finite(steps: Iterable[Values], name: str) -> list[float]:
    return [values[name] for values in steps if math.isfinite(values.get(name, math.nan))]
