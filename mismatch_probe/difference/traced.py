"""Estimates that remember what they were computed from, so that two of them can be compared, at any level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mismatch_probe.stats.effective_share import relative_excess
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Function, Scale, interval, jackknife, ratio, squared_variation, variance
from mismatch_probe.stats.metrics import metrics_of
from mismatch_probe.stats.results import Estimate, Unit
from mismatch_probe.stats.sequences import Floats, Ints, Reals, TokenPair


@dataclass(frozen=True)
class Totals:
    """A metric as `function` of its cluster totals `columns` [K, G].

    units: tokens or sequences of each cluster [G]; clusters: their numbers [G].
    """

    function: Function
    columns: Floats
    units: Floats
    clusters: Ints


@dataclass(frozen=True, kw_only=True)
class Traced(Estimate):
    """An estimate, the same at another level (`at`), and its totals; None for a quantile, which has none.

    positive: by nature, so that it can be so many times another.
    """

    at: Callable[[float], Estimate | None]
    totals: Totals | None
    positive: bool


class TracingEstimator(Estimator):
    """Makes the estimates of `Estimator`, traced; extremes stay bare."""

    def smooth(
        self, function: Function, columns: Sequence[Floats], by: Unit, scale: Scale = Scale.SIGNED
    ) -> Traced | None:
        units = self.counts(by)
        estimate = jackknife(function, np.stack(columns), units)
        if estimate is None:
            return None
        return self._traced(
            lambda other: other.present(interval(estimate, scale, other.level), by),
            self._totals(function, columns, units),
            positive=scale is not Scale.SIGNED,
        )

    def root_mean_square(self, values: Reals, by: Unit) -> Traced | None:
        units = self.counts(by)
        totals = self._totals(_root_of_ratio, [self.totals(values**2, by), units], units)
        return self._traced(lambda other: other.root_mean_square(values, by), totals)

    def standard_deviation(self, values: Reals, by: Unit) -> Traced | None:
        centred, units = values - values.mean(), self.counts(by)
        columns = [units, self.totals(centred, by), self.totals(centred**2, by)]
        return self._traced(
            lambda other: other.standard_deviation(values, by), self._totals(_standard_deviation, columns, units)
        )

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> Traced:
        totals = self._totals(ratio, [events, units], units)
        estimate = self._traced(lambda other: other.share_of_totals(events, units, by), totals)
        assert estimate is not None, "a share always exists"
        return estimate

    def effective_share(self, log_ratios: Floats, by: Unit) -> Traced | None:
        units, excess = self.counts(by), relative_excess(log_ratios)
        totals = self._totals(_effective_share, [units, self.totals(excess, by), self.totals(excess**2, by)], units)
        return self._traced(lambda other: other.effective_share(log_ratios, by), totals)

    def quantile(self, sorted_values: Reals, values: Reals, probability: float, by: Unit) -> Estimate:
        estimate = self._traced(lambda other: other.quantile(sorted_values, values, probability, by))
        assert estimate is not None, "a quantile always exists"
        return estimate

    def _traced(
        self,
        make: Callable[[Estimator], Estimate | None],
        totals: Totals | None = None,
        positive: bool = True,
    ) -> Traced | None:
        def at(level: float) -> Estimate | None:
            return make(Estimator(self.sequences, level))

        estimate = at(self.level)
        if estimate is None:
            return None
        return Traced(**vars(estimate), at=at, totals=totals, positive=positive)

    def _totals(self, function: Function, columns: Sequence[Floats], units: Floats) -> Totals:
        return Totals(function, np.stack(columns), units, np.unique(self.sequences.clusters))


def traced_metrics(pair: TokenPair, level: float = 0.95) -> tuple[dict[str, Estimate], dict[str, str]]:
    """`pair_metrics` with every estimate traced that has an interval."""
    return metrics_of(pair, TracingEstimator(pair.sequences, level))


def without_trace(estimate: Estimate) -> Estimate:
    """The estimate without its trace, as records keep it."""
    return Estimate(**{field.name: getattr(estimate, field.name) for field in fields(Estimate)})


def _effective_share(count: Floats, excess: Floats, excess_squared: Floats) -> Floats:
    return np.asarray(1 / (1 + squared_variation(count, excess, excess_squared)))


def _root_of_ratio(numerator: Floats, denominator: Floats) -> Floats:
    return np.asarray(np.sqrt(numerator / denominator))


def _standard_deviation(count: Floats, x: Floats, xx: Floats) -> Floats:
    return np.asarray(np.sqrt(variance(count, x, xx)))
