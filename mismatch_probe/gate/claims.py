"""What a check measures, with a one-sided bound at any level: the metric itself, or how much worse it got."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mismatch_probe.difference.traced import Traced
from mismatch_probe.difference.versus import ratio_at
from mismatch_probe.stats.results import Estimate

SMALLEST_P = 1e-9
_STEPS = 50

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Claim:
    """A value and its one-sided bounds: `bounds(alpha)` is (lower, upper), each wrong with probability alpha."""

    value: float
    bounds: Callable[[float], Bounds]

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

    def within(self, limit: float, alpha: float, *, upper: bool) -> bool:
        """Whether the data put the value on the right side of the limit."""
        low, high = self.bounds(alpha)
        return (high is not None and high <= limit) if upper else (low is not None and low >= limit)

    def _beyond(self, alpha: float, limit: float, upper: bool) -> bool:
        low, high = self.bounds(alpha)
        return (low is not None and low > limit) if upper else (high is not None and high < limit)


def absolute(estimate: Estimate) -> Claim:
    """The metric itself; no bounds where the estimate has none."""

    def bounds(alpha: float) -> Bounds:
        both_sided = estimate.at(1 - 2 * alpha) if isinstance(estimate, Traced) else None
        return (None, None) if both_sided is None else (both_sided.low, both_sided.high)

    return Claim(estimate.value, bounds)


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

    return Claim(_worse(worse_by.value, worse_by.value, higher_is_better)[0], bounds)


def _worse(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    return (1 - high, 1 - low) if higher_is_better else (low - 1, high - 1)
