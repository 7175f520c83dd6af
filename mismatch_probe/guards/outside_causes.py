"""Breaches that no update of the policy can have made: what a rollback would not mend."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from mismatch_probe.guards.answers import SKIP, WARN
from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnosis import Window
from mismatch_probe.guards.reward_jump import REWARD, reward_jump
from mismatch_probe.guards.rules.base import Values
from mismatch_probe.guards.window_evidence import engine_follows

_SHIFT: Final = "update/policy_shift_k3"
_SMALL_SHIFT_NATS: Final = 1e-3
_SHIFT_GROWN: Final = 10.0
_ENTROPY_GROWN: Final = 2.0
_MISMATCH_GROWN: Final = 10.0


def restrained(event: GuardEvent, window: Window) -> GuardEvent:
    """The firing of a guard that `needs_update`, asking for a warning alone, or for a skipped update, where no update
    made the breach; else as it is.

    window: the steps up to that of the event.
    """
    if event.metric == _SHIFT and not engine_follows(window, event.value):
        why = "the engine took the same weights and is not as far from where it was, so it is the scores that changed"
        return replace(event, actions=(SKIP,), sentence=f"{event.sentence}; {why}")
    if event.metric == REWARD and (jump := reward_jump(window)) is not None and policy_is_calm(window, jump.begun):
        why = f"no update near step {jump.begun} moved the policy far, so the rewards or the problems changed"
        return replace(event, actions=(WARN,), sentence=f"{event.sentence}; {why}")
    return event


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


def _finite(steps: Iterable[Values], name: str) -> list[float]:
    return [values[name] for values in steps if math.isfinite(values.get(name, math.nan))]
