"""What a check measures, which metrics a limit can be put on, and the error budget over declared looks.

At information fraction t the budget spent is alpha ln(1 + (e - 1) t), Lan and DeMets' Pocock-type function [Lan and
DeMets 1983, Biometrika 70:659]. Each look's nominal level follows from the joint normal law of the statistics at all
looks so far, integrated look by look [Armitage, McPherson and Rowe 1969, JRSS A 132:235].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import optimize, special

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.difference.versus import Traced, ratio_at, traced_metrics
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.findings import Localization
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.stats.catalogue import MetricFacts, facts_of
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair

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


AGGREGATES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min", "std")


@cache
def _example() -> dict[str, Estimate]:
    ids, nats = np.arange(4), np.arange(4.0)
    pair = TokenPair(
        Sequences.of_lengths([2, 2]), log_pi=-nats, log_mu=-2 * nats, top1_pi=ids, top1_mu=ids, entropy_pi=1 + nats
    )
    return traced_metrics(pair)[0]


def known_metrics() -> frozenset[str]:
    """Every metric there is."""
    return frozenset(_example())


def _facts(name: str) -> MetricFacts:
    facts = facts_of(name)
    assert facts is not None, name
    return facts


def full_name(metric: str, aggregate: str) -> str:
    """`abs_logprob_diff` and `p99` -> `abs_logprob_diff_p99`; a mean goes by the metric's own name."""
    return metric if aggregate == "mean" else f"{metric}_{aggregate}"


def why_never_blocking(name: str, clip: float | None) -> str | None:
    """Why a metric cannot decide, and what to use instead; None where it can.

    An extreme has no interval, and an exponential of unbounded log-ratios has one token or response deciding it.
    """
    facts = _facts(name)
    if facts.needs_clip and clip is None:
        return "without clip its heavy tail hangs on single tokens; add clip = 5, or use abs_logprob_diff"
    return facts.never_blocks or None


def range_of(name: str, clip: float | None) -> tuple[float, float]:
    """The least and the most that a metric can be, whatever the data; d lies within +-`clip` where it is given."""
    facts = _facts(name)
    most = facts.most if clip is None or facts.under_clip is None else facts.under_clip(clip)
    return facts.least, most


def has_regression(name: str) -> bool:
    """Whether a metric is positive by nature and best at an end, so that it can be so many per cent worse."""
    return _facts(name).can_regress


def is_better_higher(name: str) -> bool:
    return _facts(name).higher_is_better


_FITS = (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
_WEIGHTS_ONLY = "it was made with --weights-only"
_NUM_LOSS_SCALES = 25


@dataclass(frozen=True)
class FiledMetric:
    """`read` gives the value, or why the document has none; it lies between `least` and `most`."""

    read: Callable[[Any], float | str]
    least: float
    most: float


def _fits(headroom: Headroom) -> float | str:
    if headroom.activations is None and headroom.verdict.code in _FITS:
        return _WEIGHTS_ONLY
    return float(headroom.verdict.code in _FITS)


def _margin_bits(headroom: Headroom) -> float | str:
    if headroom.activations is None:
        return _WEIGHTS_ONLY
    largest = [headroom.weights.total.largest, *(result.largest or 0.0 for result in headroom.activations.tightest)]
    return math.log2(Dtype.FP16.largest / max(largest)) if max(largest) > 0 else "every weight and result is 0"


def _loss_scales(headroom: Headroom) -> float | str:
    if headroom.plain is None:
        return _WEIGHTS_ONLY
    low, high = headroom.plain.from_exponent, headroom.plain.to_exponent
    return 0.0 if low is None or high is None else float(high - low + 1)


def _suspects(localization: Localization) -> float | str:
    return float(len(localization.suspects))


def _largest_share(localization: Localization) -> float | str:
    if not localization.settings.interventions:
        return "it was made with --no-interventions"
    ranked = [] if localization.interventions is None else localization.interventions.ranked
    return max((intervention.removed.value for intervention in ranked), default=0.0)


HEADROOM = {
    "headroom_fits": FiledMetric(_fits, 0.0, 1.0),
    "headroom_margin_bits": FiledMetric(_margin_bits, -math.inf, math.inf),
    "headroom_loss_scales": FiledMetric(_loss_scales, 0.0, _NUM_LOSS_SCALES),
}
LOCALIZE = {
    "localize_suspects": FiledMetric(_suspects, 0.0, math.inf),
    "localize_largest_share": FiledMetric(_largest_share, -math.inf, 1.0),
}
FILED_METRICS = {**HEADROOM, **LOCALIZE}
