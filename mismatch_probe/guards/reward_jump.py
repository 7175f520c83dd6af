"""Whether the reward changed between two steps, or over several: a level that steps, against one that slides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from mismatch_probe.guards.diagnosis import Window
from mismatch_probe.stats.sequences import Floats

REWARD: Final = "reward/mean"
_FEWEST_BEFORE: Final = 4
_FEWEST_AFTER: Final = 2
_ERRORS: Final = 4.0
"""Standard errors of the change, which noise does not reach at one of a dozen places."""
_SLIDES: Final = (4, 6, 8, 12)
"""Steps that a fall takes which is no jump."""
_BETTER: Final = 2.0
"""Of squares, in units of a step's variance. Where a step errs by a sixth of the fall, nine jumps of ten pass, and of
falls over four steps and more one of ten at the most.
"""


@dataclass(frozen=True)
class RewardJump:
    """The mean reward went from one level to another between two steps. begun: the first step of the later level."""

    begun: int
    before: float
    after: float


def reward_jump(window: Window) -> RewardJump | None:
    """Where the reward changed at once and is level before and after; None where it did not, or slid.

    Two levels are fitted to the steps by least squares, and two that are joined by a slope over some steps. A jump is a
    change by more than `_ERRORS` standard errors which the first describes better.
    """
    steps = [step for step in sorted(window.history) if math.isfinite(window.history[step].get(REWARD, math.nan))]
    if len(steps) < _FEWEST_BEFORE + _FEWEST_AFTER:
        return None
    means = np.array([window.history[step][REWARD] for step in steps])
    variance = _variance(means, [window.history[step].get("reward/mean_error", math.nan) for step in steps])
    numbers = np.arange(len(steps))
    places = range(_FEWEST_BEFORE, len(steps) - _FEWEST_AFTER + 1)
    left, place = min((_left(means, np.where(numbers >= place, 1.0, 0.0)), place) for place in places)
    before, after = float(means[:place].mean()), float(means[place:].mean())
    error = math.sqrt(variance * (1 / place + 1 / (len(steps) - place)))
    slid = min(
        _left(means, np.clip((numbers - start + 1) / slide, 0.0, 1.0))
        for slide in _SLIDES
        for start in range(1, len(steps) - 1)
    )
    if abs(after - before) <= _ERRORS * error or slid - left <= _BETTER * variance:
        return None
    return RewardJump(steps[place], before, after)


def _left(means: Floats, course: Floats) -> float:
    """The sum of squares that is left of the means [S] where two levels are fitted, mixed as the course says [S]."""
    columns = np.stack([1 - course, course], axis=1)
    rest = means - columns @ np.linalg.lstsq(columns, means)[0]
    return float(rest @ rest)


def _variance(means: Floats, errors: Sequence[float]) -> float:
    """Of a step: the mean square of the errors that are known, else from the differences of steps, which a slow change
    leaves alone.
    """
    given = [error**2 for error in errors if math.isfinite(error) and error > 0]
    if given:
        return float(np.mean(given))
    return float(np.mean([(two - one) ** 2 for one, two in pairwise(means.tolist())])) / 2
