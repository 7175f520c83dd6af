"""Estimates that remember what they were computed from, so that two of them can be compared, at any level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Function, Scale, interval, jackknife, ratio, squared_variation
from mismatch_probe.stats.metrics import metrics_of
from mismatch_probe.stats.results import Estimate, Unit
from mismatch_probe.stats.sequences import Floats, Ints, Reals, TokenPair


@dataclass(frozen=True)
class Totals:
    """A metric as `function` of its cluster totals `columns` [K, G]; `clusters` [G] are the numbers of the clusters."""

    function: Function
    columns: Floats
    clusters: Ints


@dataclass(frozen=True)
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
        found = jackknife(function, np.stack(columns))
        if found is None:
            return None
        return self._traced(
            lambda other: other.present(interval(found, scale, other.level), by),
            function,
            columns,
            positive=scale is not Scale.SIGNED,
        )

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> Traced:
        found = self._traced(lambda other: other.share_of_totals(events, units, by), ratio, [events, units])
        assert found is not None, "a share always exists"
        return found

    def effective_share(self, excess: Floats, by: Unit) -> Traced | None:
        columns = [self.counts(by), self.totals(excess, by), self.totals(excess**2, by)]
        return self._traced(lambda other: other.effective_share(excess, by), _effective_share, columns)

    def quantile(self, sorted_values: Reals, values: Reals, probability: float, by: Unit) -> Estimate:
        found = self._traced(lambda other: other.quantile(sorted_values, values, probability, by))
        assert found is not None, "a quantile always exists"
        return found

    def _traced(
        self,
        make: Callable[[Estimator], Estimate | None],
        function: Function | None = None,
        columns: Sequence[Floats] = (),
        positive: bool = True,
    ) -> Traced | None:
        def at(level: float) -> Estimate | None:
            return make(Estimator(self.sequences, level))

        estimate = at(self.level)
        if estimate is None:
            return None
        totals = None
        if function is not None:
            totals = Totals(function, np.stack(columns), np.unique(self.sequences.clusters))
        return Traced(**vars(estimate), at=at, totals=totals, positive=positive)


def traced_metrics(pair: TokenPair, level: float = 0.95) -> tuple[dict[str, Estimate], dict[str, str]]:
    """`pair_metrics` with every estimate traced that has an interval."""
    return metrics_of(pair, TracingEstimator(pair.sequences, level))


def plain(estimate: Estimate) -> Estimate:
    """The estimate without its trace, as records keep it."""
    return Estimate(**{field.name: getattr(estimate, field.name) for field in fields(Estimate)})


def _effective_share(count: Floats, excess: Floats, excess_squared: Floats) -> Floats:
    return np.asarray(1 / (1 + squared_variation(count, excess, excess_squared)))
