"""What a check measures, with a bound at any level, and the error budget over declared looks.

At information fraction t the budget spent is alpha ln(1 + (e - 1) t), Lan and DeMets' Pocock-type function [Lan and
DeMets 1983, Biometrika 70:659]. Each look's nominal level follows from the joint normal law of the statistics at all
looks so far, integrated look by look [Armitage, McPherson and Rowe 1969, JRSS A 132:235].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import optimize, special

from mismatch_probe.difference.versus import Traced, ratio_at
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats

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


LEAST_STEP = 1.5
"""A look needs this many times the sequences of the one before."""

_NODES = 128
_TAIL = 9.0
_HIGHEST = 12.0


def declared_looks(min_sequences: int, max_sequences: int) -> list[int]:
    """Numbers of sequences at which the gate may look: doubling, and a last step of at least LEAST_STEP.

    >>> declared_looks(256, 1100)
    [256, 512, 1100]
    """
    looks = [min_sequences]
    while looks[-1] * 2 * LEAST_STEP <= max_sequences:
        looks.append(looks[-1] * 2)
    return looks if looks[-1] == max_sequences else [*looks, max_sequences]


def look_number(looks: Sequence[int], num_sequences: int) -> int:
    """How many of the declared looks a sample of this size has reached; 0 when it is too small for the first."""
    return sum(num_sequences >= look for look in looks)


def fractions_so_far(looks: Sequence[int], num_sequences: int) -> tuple[float, ...]:
    """Information fractions of the looks up to the current one, which counts at its real size.

    Looks before are taken as made, whether the sample came in one go or grew: a sample is at one look only, however
    often it is gated.
    """
    before = looks[: max(look_number(looks, num_sequences) - 1, 0)]
    return (*(look / looks[-1] for look in before), min(num_sequences / looks[-1], 1.0))


def spent(alpha: float, fraction: float) -> float:
    """Error budget spent up to an information fraction."""
    return alpha * math.log(1 + (math.e - 1) * fraction)


@cache
def nominal_level(alpha: float, fractions: tuple[float, ...]) -> float:
    """One-sided level at which the last of these looks tests, so that all together err at most as often as was spent.

    Raises:
        ValueError: the fractions do not rise within (0, 1].
    """
    if not all(low < high for low, high in zip((0.0, *fractions), fractions, strict=False)) or fractions[-1] > 1:
        raise ValueError(f"information fractions {fractions} do not rise within (0, 1]")
    points, weights = np.zeros(1), np.ones(1)
    before = done = 0.0
    for fraction in fractions:
        budget = spent(alpha, fraction) - done
        step = math.sqrt(fraction - before)
        bound = _bound(points, weights, step, budget, fraction)
        points, weights = _continued(points, weights, step, bound, fraction)
        before, done = fraction, done + budget
    return float(special.ndtr(-bound / math.sqrt(fractions[-1])))


def _bound(points: Floats, weights: Floats, step: float, budget: float, fraction: float) -> float:
    """The value of the score process that it crosses with probability `budget` at this look and at none before."""

    def excess(bound: float) -> float:
        return float(weights @ special.ndtr((points - bound) / step)) - budget

    return float(optimize.brentq(excess, 0.0, _HIGHEST * math.sqrt(fraction), xtol=1e-12))


@cache
def _nodes_and_weights() -> tuple[Floats, Floats]:
    """Of Gauss and Legendre, on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def _continued(points: Floats, weights: Floats, step: float, bound: float, fraction: float) -> tuple[Floats, Floats]:
    """The law of the score process among paths that have not crossed, as weighted points (Gauss-Legendre)."""
    low = -_TAIL * math.sqrt(fraction)
    nodes, node_weights = _nodes_and_weights()
    new_points = low + (nodes + 1) / 2 * (bound - low)
    kernel = np.exp(-(((new_points[:, None] - points) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
    return new_points, kernel @ weights * node_weights * (bound - low) / 2
