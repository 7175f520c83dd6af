"""What a check measures, with a one-sided bound at any level: the metric itself, or how much worse it got."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mismatch_probe.difference.versus import Traced, ratio_at
from mismatch_probe.stats.results import Estimate

SMALLEST_P = 1e-9
_STEPS = 50

Bounds = tuple[float | None, float | None]
Passing = Callable[[float, bool, float], float | None]
"""The bound that a pass is held against: of alpha, whether the limit is an upper one, how many times the sample."""


@dataclass(frozen=True)
class Claim:
    """A value and its one-sided bounds: `bounds(alpha)` is (lower, upper), each wrong with probability alpha.

    passing: the bound that a pass is held against, which also holds what is too rare for the sample to show.
    """

    value: float
    bounds: Callable[[float], Bounds]
    passing: Passing

    def p_beyond(self, limit: float, *, upper: bool) -> float:
        """The smallest alpha at which the data put the value beyond the limit (above an upper one); 1 where it is not.

        Found by halving, because the bounds of shares and quantiles have no formula to invert.
        """
        if not (self.value > limit if upper else self.value < limit):
            return 1.0
        low, high = math.log(SMALLEST_P), math.log(0.5)
        if self._beyond(math.exp(low), limit, upper):
            return SMALLEST_P
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._beyond(math.exp(middle), limit, upper) else (middle, high)
        return math.exp(high)

    def within(self, limit: float, alpha: float, *, upper: bool, times: float = 1.0) -> bool:
        """Whether the data put the value on the right side of the limit; a sample so many times as large would."""
        return _keeps(self.passing(alpha, upper, times), limit, upper)

    def is_held_back_by_tail(self, limit: float, alpha: float, *, upper: bool) -> bool:
        """Whether the interval keeps the limit, and only what the sample is too small to show may break it."""
        low, high = self.bounds(alpha)
        return _keeps(high if upper else low, limit, upper) and not self.within(limit, alpha, upper=upper)

    def _beyond(self, alpha: float, limit: float, upper: bool) -> bool:
        low, high = self.bounds(alpha)
        return (low is not None and low > limit) if upper else (high is not None and high < limit)


def absolute(estimate: Estimate) -> Claim:
    """The metric itself; no bounds where the estimate has none."""

    def bounds(alpha: float) -> Bounds:
        both_sided = estimate.at(1 - 2 * alpha) if isinstance(estimate, Traced) else None
        return (None, None) if both_sided is None else (both_sided.low, both_sided.high)

    def passing(alpha: float, upper: bool, times: float) -> float | None:
        both_sided = estimate.at(1 - 2 * alpha, times) if isinstance(estimate, Traced) else None
        if both_sided is None or both_sided.low is None or both_sided.high is None:
            return None
        bounded = both_sided.high if upper else both_sided.low
        tail_bound = both_sided.tail_bound
        return bounded if tail_bound is None else (max if upper else min)(bounded, tail_bound)

    return Claim(estimate.value, bounds, passing)


def regression(baseline: Estimate, run: Estimate, *, higher_is_better: bool) -> Claim | None:
    """How much worse the run is, as a share of the baseline's value; None where either value is 0.

    The ratio of the two is bounded on the log scale: a margin of 0.1 stands for a ratio of 1.1, or 0.9 where higher
    is better (a non-inferiority test with a ratio margin [Rothmann, Wiens and Chan 2012, Design and Analysis of
    Non-Inferiority Trials, chapter 11]).
    """
    ratio = ratio_at(baseline, run)
    worse_by = None if ratio is None else ratio(0.9)
    if ratio is None or worse_by is None:
        return None

    def bounds(alpha: float) -> Bounds:
        bounded = ratio(1 - 2 * alpha)
        if bounded is None or bounded.low is None or bounded.high is None:
            return None, None
        return _worse(bounded.low, bounded.high, higher_is_better)

    def passing(alpha: float, upper: bool, times: float) -> float | None:
        return bounds(alpha)[1 if upper else 0]

    return Claim(_worse(worse_by.value, worse_by.value, higher_is_better)[0], bounds, passing)


def _keeps(bound: float | None, limit: float, upper: bool) -> bool:
    return bound is not None and (bound <= limit if upper else bound >= limit)


def _worse(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    return (1 - high, 1 - low) if higher_is_better else (low - 1, high - 1)
