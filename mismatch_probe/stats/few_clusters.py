"""What few clusters (prompts) leave open: how many of them an error really rests on, and the tail they may hide."""

from collections.abc import Callable

import numpy as np
from scipy import special

from mismatch_probe.stats.sequences import Floats

_LEAST_SHARE = 0.05
"""A cluster far below the whole says nothing about the upper tail: it counts as this share of the whole."""


def leverage_degrees(units: Floats) -> float:
    """Degrees of freedom of a jackknifed error over clusters of these sizes [G]: G - 1 where all are alike, about 1
    where one holds nearly everything.

    Satterthwaite's, from the trace of the quadratic form that the error is [Bell and McCaffrey 2002, Survey Methodology
    28:169], where the variance of a cluster's mean falls with its size.
    """
    share = units / units.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = share / (1 - share)
        squares, fourths = (odds**2).sum(), (odds**4).sum()
        degrees = odds.sum() ** 2 / (squares + squares**2 - fourths)
    return float(np.clip(np.nan_to_num(degrees, nan=1.0), 1.0, max(units.size - 1.0, 1.0)))


def log_variance(function: Callable[..., Floats], columns: Floats, value: float) -> float:
    """Variance of the logs of `function` over the single clusters of columns [K, G]; 0 where it has no positive value.

    Clusters where it does not exist are left out.
    """
    if not value > 0:
        return 0.0
    with np.errstate(all="ignore"):
        own = function(*columns)
    own = own[np.isfinite(own)]
    return float(np.log(np.maximum(own, _LEAST_SHARE * value)).var(ddof=1)) if own.size > 1 else 0.0


def log_normal_reach(student: float, variance: float, degrees: float, level: float) -> float:
    """How far above its value, in logs, the mean of clusters may lie whose values are log-normal.

    student: what Student's interval makes of the mean's own error. Such a mean is exp(m + s^2 / 2): its bound joins
    that error with the bound of s^2, which few clusters show too small [MOVER, Zou, Taleban and Huo 2009,
    Computational Statistics and Data Analysis 53:3755].
    """
    most = degrees / special.chdtri(degrees, (1 + level) / 2)
    return float(np.hypot(student, variance / 2 * (most - 1)))
