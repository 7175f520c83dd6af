"""Second against first: the difference and the ratio of one metric in two samples, with intervals.

Both samples lose a prompt at a time together (a joint cluster jackknife), so whatever makes them move together counts:
the same tokens in both are compared in pairs, the same prompts with other responses keep the prompts' share of the
covariance, and samples without a common prompt are compared as independent ones.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mismatch_probe.difference.traced import Totals, Traced
from mismatch_probe.stats.contrast import contrast, fewer_prompts
from mismatch_probe.stats.intervals import Scale, interval, jackknife
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats

AtLevel = Callable[[float], Estimate | None]
"""An estimate with its interval at a level."""


def second_minus_first(first: Estimate, second: Estimate, level: float) -> Estimate | None:
    """second - first; None for extremes and quantiles, whose difference has no interval here."""
    if not (isinstance(first, Traced) and isinstance(second, Traced) and first.totals and second.totals):
        return None
    return _joint(first, second, first.totals, second.totals, np.subtract, Scale.SIGNED)(level)


def second_over_first(first: Estimate, second: Estimate, level: float) -> Estimate | None:
    """second / first, of metrics that are positive by nature; None for others, for 0, and for extremes.

    Quantiles are compared as independent ones (MOVER), which errs on the wide side.
    """
    ratio = ratio_at(first, second)
    return None if ratio is None else ratio(level)


def ratio_at(first: Estimate, second: Estimate) -> AtLevel | None:
    """`second_over_first` at any level."""
    if not (isinstance(first, Traced) and isinstance(second, Traced) and first.positive and second.positive):
        return None
    if min(first.value, second.value) <= 0:
        return None
    if first.totals and second.totals:
        return _joint(first, second, first.totals, second.totals, np.divide, Scale.RATIO)
    return partial(_independent, first, second)


def _independent(first: Traced, second: Traced, level: float) -> Estimate | None:
    old, new = first.at(level), second.at(level)
    return None if old is None or new is None else contrast(new, old)


def _joint(
    first: Estimate,
    second: Estimate,
    old: Totals,
    new: Totals,
    combine: Callable[[Floats, Floats], Floats],
    scale: Scale,
) -> AtLevel:
    clusters = np.union1d(old.clusters, new.clusters)
    width = len(old.columns)
    columns = np.zeros((width + len(new.columns), clusters.size))
    columns[:width, np.searchsorted(clusters, old.clusters)] = old.columns
    columns[width:, np.searchsorted(clusters, new.clusters)] = new.columns
    units = np.zeros(clusters.size)
    for totals in (old, new):
        units[np.searchsorted(clusters, totals.clusters)] += totals.units

    def of_both(*sums: Floats) -> Floats:
        return combine(new.function(*sums[width:]), old.function(*sums[:width]))

    jackknifed = jackknife(of_both, columns, units)

    def at(level: float) -> Estimate | None:
        if jackknifed is None:
            return None
        bounds = interval(jackknifed, scale, level)
        return Estimate(
            value=bounds.value,
            low=bounds.low,
            high=bounds.high,
            level=level,
            num_sequences=first.num_sequences + second.num_sequences,
            num_tokens=first.num_tokens + second.num_tokens,
            by=first.by,
            num_prompts=fewer_prompts(first, second),
        )

    return at
