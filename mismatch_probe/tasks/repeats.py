"""Rewards asked for again: does the function repeat itself, and does each reward belong to its response?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.tasks.reward_calls import RewardLimits
from mismatch_probe.tasks.rewards import Reward, TextResponse, judge_responses

_SAME: Final = 1e-6
"""Relative difference of two rewards that count as one."""
_SAME_OF_SPREAD: Final = 0.1
"""The same in standard deviations of a step's rewards: a reward model rounds otherwise among other responses."""


@dataclass(frozen=True)
class Repeats:
    """Counts of responses whose reward was asked for again.

    with_second, with_first: of these, those whose third answer is the second one again, or the first. A function that
    judges by chance gives its three answers in any order, so the two counts are equal in expectation, however often it
    changes its mind. A reward that is of another response is never given again. Both are 0 of a function of lists,
    whose answers may depend on the other responses of a list.
    """

    differ: int = 0
    """The second answer is another than the first."""
    with_second: int = 0
    with_first: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "reward/unrepeated": float(self.differ),
            "reward/mispaired": float(self.with_second - self.with_first),
            "reward/mispaired_error": math.sqrt(self.with_second + self.with_first),
        }


def ask_again(
    reward: Reward, answers: Sequence[TextResponse], first: Floats, spread: float, limits: RewardLimits
) -> Repeats:
    """Of whole responses and what they earned [N], which may be NaN; a third time where the second answer differs. An
    answer that comes too late is not counted. spread: standard deviation of the step's rewards.
    """
    second = judge_responses(reward, answers, limits)
    bearable = _SAME_OF_SPREAD * spread
    differ = np.flatnonzero(~_same(first, second.rewards, bearable) & ~second.is_late)
    if not differ.size or reward.score_all is not None:
        return Repeats(differ.size)
    third = judge_responses(reward, [answers[row] for row in differ], limits)
    with_second = _same(second.rewards[differ], third.rewards, bearable) & ~third.is_late
    with_first = _same(first[differ], third.rewards, bearable) & ~third.is_late
    return Repeats(differ.size, int(with_second.sum()), int(with_first.sum()))


def _same(first: Floats, other: Floats, bearable: float) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = np.isclose(first, other, rtol=_SAME, atol=bearable, equal_nan=True)
    return same
