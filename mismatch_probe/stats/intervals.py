"""Confidence intervals for numbers of tokens that are not independent, all by the cluster jackknife.

Leaving one cluster (prompt) out at a time gives the standard error of any smooth function of totals [Efron and Stein
1981, Annals of Statistics 9:586; clustered it is CV3 of Cameron and Miller 2015, J. Human Resources 50:317, which errs
on the wide side]. Heavy tails make that error itself uncertain: Student's t takes Satterthwaite's degrees of freedom
from the kurtosis of the jackknife values [Satterthwaite 1946, Biometrics Bulletin 2:110; O'Neill 2014, American
Statistician 68:282], never more than the sizes of the clusters leave (`few_clusters.leverage_degrees`), and positive
skewed quantities get their interval on the log scale. There the two bounds differ
[Johnson 1978, JASA 73:536]: a sample with the rare large values has a large mean and a large error together, so its
lower bound is safe with Student's own degrees; a sample without them shows far less kurtosis than its distribution has.
The correction for that is set by simulation (`benchmarks/coverage.py`), where bootstrap-t, BCa, Hall's and power
transforms cover no better. Few clusters show no kurtosis at all, so the upper bound of a mean of positive values
is never below that of clusters whose values are log-normal (`few_clusters.log_normal_reach`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import special

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.stats.tails import PromptTail, prompt_tail

ROUNDING = 1e-12

Function = Callable[..., Floats]
_LOG: tuple[Function, Function, Function] = (np.log, lambda x: 1 / x, np.exp)
_LEAST_SHARE = 0.05
"""A cluster far below the value of all says nothing about the upper tail: it counts as this share of that value."""


class Scale(Enum):
    """The kind of number that a bound is for."""

    SIGNED = "signed"
    POSITIVE = "positive"
    """A positive number that is skewed to the right, such as a mean of squares."""
    WEIGHTS = "weights"
    """A number of exponentials of sums, which single sequences decide."""
    RATIO = "ratio"
    """The ratio of two positive numbers."""
    CORRELATION = "correlation"
    SHARE = "share"


@dataclass(frozen=True)
class Tail:
    """The correction of a bound for the tail that a sample hides."""

    times: float
    """How many times the excess kurtosis counts."""
    least: float = 2.0
    """The least degrees of freedom that may follow from it."""


_SEEN, _AS_SEEN, _SKEWED = Tail(0.0), Tail(1.0), Tail(3.0)


_LINKS: dict[Scale, tuple[Function, Function, Function]] = {
    Scale.SIGNED: (lambda x: x, np.ones_like, lambda x: x),
    Scale.POSITIVE: _LOG,
    Scale.WEIGHTS: _LOG,
    Scale.RATIO: _LOG,
    Scale.CORRELATION: (np.arctanh, lambda x: 1 / (1 - x**2), np.tanh),
    Scale.SHARE: (special.logit, lambda x: 1 / (x * (1 - x)), special.expit),
}
"""The scale on which a bound is computed: a function of the number, its derivative and its inverse."""

_TAILS: dict[Scale, tuple[Tail, Tail]] = {
    Scale.SIGNED: (_AS_SEEN, _AS_SEEN),
    Scale.POSITIVE: (_SEEN, Tail(5.0)),
    Scale.WEIGHTS: (_SEEN, Tail(9.0, least=1.25)),
    Scale.RATIO: (_SKEWED, _SKEWED),
    Scale.SHARE: (_AS_SEEN, _AS_SEEN),
}
"""The tails of the lower and the upper bound, set by simulation; a correlation's depend on its value."""


@dataclass(frozen=True)
class Jackknife:
    """A value, its standard error, and what shows how certain that error is; NaN where there is no error."""

    value: float
    error: float
    kurtosis: float
    num_clusters: int
    leverage_degrees: float | None = None
    """The degrees of freedom that the sizes of the clusters leave; None where these are equal."""
    log_variance: float = 0.0
    """The variance of the logs of the clusters' own values."""
    prompts: PromptTail | None = None
    """The tail of the clusters' own values."""

    @property
    def most_degrees(self) -> float:
        return self.num_clusters - 1.0 if self.leverage_degrees is None else self.leverage_degrees

    def degrees(self, tail: Tail) -> float:
        """Satterthwaite's degrees of freedom: those of a variance estimated from values of this kurtosis."""
        if not self.kurtosis > 3:
            return self.most_degrees
        degrees_by_kurtosis = 2 * self.num_clusters / (2 + tail.times * (self.kurtosis - 3)) - 1
        return min(max(degrees_by_kurtosis, tail.least), self.most_degrees)


@dataclass(frozen=True)
class Interval:
    """A value and its bounds; `tail_bound` is that of a positive quantity with what rarer clusters may add."""

    value: float
    low: float | None
    high: float | None
    tail_bound: float | None = None


def jackknife(
    function: Function, columns: Floats, units: Floats | None = None, *, is_share: bool = False
) -> Jackknife | None:
    """`function` of column totals with its leave-one-cluster-out standard error; columns [K, G].

    units: sizes of the clusters [G], tokens or sequences; None where they are equal. is_share: the value is a share of
    the units; the tail is then that of the rarer kind of unit. `function` takes K arrays of totals of one shape and
    does not change when all are scaled alike. None where the value does not exist; the error is NaN with fewer than two
    clusters, or where the value without one of them does not exist.
    """
    totals = columns.sum(axis=1, keepdims=True)
    num_clusters = columns.shape[1]
    with np.errstate(all="ignore"):
        values = function(*np.concatenate([totals, totals - columns], axis=1))
        value, without_one = float(values[0]), values[1:]
        if not np.isfinite(value):
            return None
        if num_clusters < 2:
            return Jackknife(value, np.nan, np.nan, num_clusters)
        squares = (without_one - without_one.mean()) ** 2
        error = np.sqrt((num_clusters - 1) / num_clusters * squares.sum())
        kurtosis = num_clusters * (squares**2).sum() / squares.sum() ** 2
        own = function(*columns)
    degrees = None if units is None else leverage_degrees(units)
    spread = log_variance(own, value)
    prompts = prompt_tail(1 - own if is_share and value > 1 / 2 else own)
    return Jackknife(value, float(error), float(kurtosis), num_clusters, degrees, spread, prompts)


def interval(estimate: Jackknife, scale: Scale, level: float, times: float = 1.0) -> Interval:
    """A jackknifed value with its bounds on `scale`; none where one is infinite.

    times: the bounds are those that a sample so many times as large would have. They are the value itself where no
    cluster changes it: then the sample shows nothing of its tail.
    """
    value, error = estimate.value, estimate.error / math.sqrt(times)
    if not np.isfinite(error):
        return Interval(value, None, None)
    if error == 0:
        return Interval(value, value, value, value if scale is Scale.POSITIVE else None)
    to_scale, slope, from_scale = _LINKS[scale]
    with np.errstate(all="ignore"):
        degrees = [estimate.degrees(tail) for tail in _tails(scale, value)]
        own_error = error * slope(np.float64(value))
        reach = special.stdtrit(degrees, (1 + level) / 2) * own_error
        if scale is Scale.POSITIVE and own_error > 0:
            student = special.stdtrit(estimate.most_degrees, (1 + level) / 2) * own_error
            reach[1] = max(reach[1], log_normal_reach(student, estimate.log_variance, estimate.most_degrees, level))
        if not np.isfinite(reach).all():
            return Interval(value, None, None)
        low, high = from_scale(to_scale(np.float64(value)) + reach * [-1, 1])
    if not np.isfinite(high):
        return Interval(value, None, None)
    rest = estimate.prompts.rest(times) if scale is Scale.POSITIVE and estimate.prompts is not None else None
    return Interval(value, float(low), float(high), None if rest is None else float(high) + rest)


def _tails(scale: Scale, value: float) -> tuple[Tail, Tail]:
    """A correlation near 1 is 1 minus a positive skewed quantity, so its tail is towards 0; near 0 it has two."""
    if scale is not Scale.CORRELATION:
        return _TAILS[scale]
    inwards, outwards = Tail(1 + 4 * abs(value)), Tail(1 - abs(value))
    return (inwards, outwards) if value > 0 else (outwards, inwards)


def share_interval(estimate: Jackknife, num_units: int, level: float) -> Interval:
    """Clopper-Pearson bounds for a share at its effective sample size [Korn and Graubard 1998, Survey Method. 24:193].

    A share of exactly 0 or 1 says nothing about how its events cluster; the sample size is then the number of clusters,
    the most cautious choice (the rule of three over clusters). The tail is that of the rarer kind of unit. Where
    clusters are single units the bounds are exact. The correction for the hidden tail grows towards 0 and 1, as the
    skewness of a share does.
    """
    share, num_clusters = estimate.value, estimate.num_clusters
    if num_clusters < 2:
        return Interval(share, None, None)
    if share in (0.0, 1.0):
        effective = float(num_clusters)
    elif estimate.error == 0:
        effective = float(num_units)
    else:
        hidden_tail = Tail(1.0 + 2.0 * abs(1 - 2 * share))
        degrees = num_units - 1.0 if num_units == num_clusters else estimate.degrees(hidden_tail)
        quantiles = special.stdtrit([num_units - 1.0, degrees], (1 + level) / 2)
        effective = min(share * (1 - share) / estimate.error**2 * (quantiles[0] / quantiles[1]) ** 2, float(num_units))
    events, tail = share * effective, (1 - level) / 2
    low = 0.0 if share == 0 else float(special.betaincinv(events, effective - events + 1, tail))
    high = 1.0 if share == 1 else float(special.betaincinv(events + 1, effective - events, 1 - tail))
    low, high = min(low, share), max(high, share)
    if estimate.prompts is None:
        return Interval(share, low, high)
    rest = estimate.prompts.rest(most=1.0)
    return Interval(share, low, high, min(high + rest, 1.0) if share <= 1 / 2 else max(low - rest, 0.0))


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    return numerator / denominator


def variance(count: Floats, x: Floats, xx: Floats) -> Floats:
    """The variance from totals of values about a fixed origin near their mean."""
    return np.asarray(np.maximum(xx / count - (x / count) ** 2, 0))


def correlation(count: Floats, x: Floats, y: Floats, xx: Floats, yy: Floats, xy: Floats) -> Floats:
    """Pearson's correlation from totals of x, y and their products about any fixed origin near the means.

    NaN where either varies by no more than rounding.
    """
    variances = [np.where(sq - s**2 / count > ROUNDING * sq, sq - s**2 / count, np.nan) for s, sq in ((x, xx), (y, yy))]
    return np.asarray((xy - x * y / count) / np.sqrt(variances[0] * variances[1]))


def squared_variation(count: Floats, excess: Floats, excess_squared: Floats) -> Floats:
    """Squared coefficient of variation of weights w = 1 + u from the totals of u and u^2, exact even for tiny u.

    n sum w^2 / (sum w)^2 - 1 = (n sum u^2 - (sum u)^2) / (n + sum u)^2; Kish's effective share is 1 / (1 + this).
    """
    return np.asarray(np.maximum(count * excess_squared - excess**2, 0) / (count + excess) ** 2)


def leverage_degrees(units: Floats) -> float:
    """Degrees of freedom of a jackknifed error over clusters of these sizes [G].

    They are G - 1 where all sizes are equal and about 1 where one cluster has nearly everything: Satterthwaite's, from
    the trace of the error's quadratic form [Bell and McCaffrey 2002, Survey Methodology 28:169], where the variance of
    a cluster's mean falls with its size.
    """
    share = units / units.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = share / (1 - share)
        squares, fourths = (odds**2).sum(), (odds**4).sum()
        degrees = float(odds.sum() ** 2 / (squares + squares**2 - fourths))
    return 1.0 if math.isnan(degrees) else min(max(degrees, 1.0), max(units.size - 1.0, 1.0))


def log_variance(own: Floats, value: float) -> float:
    """Variance of the logs of the clusters' own values [G]; 0 where the value of all is not positive.

    Clusters without a value (NaN) are left out.
    """
    if not value > 0:
        return 0.0
    own = own[np.isfinite(own)]
    return float(np.log(np.maximum(own, _LEAST_SHARE * value)).var(ddof=1)) if own.size > 1 else 0.0


def log_normal_reach(student: float, variance: float, degrees: float, level: float) -> float:
    """The distance in logs from the mean of log-normal cluster values to its upper bound.

    student: the distance by Student's interval from the mean's own error. Such a mean is exp(m + s^2 / 2): its bound
    joins that error with the bound of s^2, which few clusters show too small [MOVER, Zou, Taleban and Huo 2009,
    Computational Statistics and Data Analysis 53:3755].
    """
    most = degrees / special.chdtri(degrees, (1 + level) / 2)
    return float(np.hypot(student, variance / 2 * (most - 1)))
