"""Estimates that remember what they were computed from, so that two of them can be compared, at any level."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Protocol

import numpy as np

from mismatch_probe.stats.estimator import Estimator, Monotone, mapped
from mismatch_probe.stats.intervals import Function, Scale, interval, jackknife, ratio, share_interval
from mismatch_probe.stats.metrics import metrics_of
from mismatch_probe.stats.results import Estimate, Unit
from mismatch_probe.stats.sequences import Floats, Ints, Reals, TokenPair
from mismatch_probe.stats.tails import ErrorTail, Terms


@dataclass(frozen=True)
class Totals:
    """A metric as `function` of its cluster totals `columns` [K, G].

    units: tokens or sequences of each cluster [G]; clusters: their numbers [G].
    """

    function: Function
    columns: Floats
    units: Floats
    clusters: Ints


class AtLevel(Protocol):
    """An estimate with its bounds at a level, as a sample so many times as large would give them."""

    def __call__(self, level: float, times: float = 1.0) -> Estimate | None: ...


@dataclass(frozen=True, kw_only=True)
class Traced(Estimate):
    """An estimate, the same at another level and with the bounds of a larger sample (`at`), and its totals; None for a
    quantile, which has none.

    positive: by nature, so that it can be so many times another.
    """

    at: AtLevel
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
            lambda other: other.present(interval(estimate, scale, other.level, other.times), by),
            self._totals(function, columns, units),
            positive=scale is not Scale.SIGNED,
        )

    def mapped(self, estimate: Estimate, function: Monotone) -> Traced:
        assert isinstance(estimate, Traced)
        totals = estimate.totals
        assert totals is not None, "what is smooth has totals"

        def at(level: float, times: float = 1.0) -> Estimate | None:
            other = estimate.at(level, times)
            return None if other is None else mapped(other, function)

        own = replace(totals, function=lambda *columns: function(totals.function(*columns)))
        return Traced(**vars(mapped(without_trace(estimate), function)), at=at, totals=own, positive=True)

    def with_rest(self, estimate: Estimate | None, tail: ErrorTail | None, terms: Terms) -> Traced | None:
        if estimate is None:
            return None
        assert isinstance(estimate, Traced)

        def at(level: float, times: float = 1.0) -> Estimate | None:
            return Estimator(self.sequences, level, times).with_rest(estimate.at(level, times), tail, terms)

        own = Estimator(self.sequences, self.level).with_rest(without_trace(estimate), tail, terms)
        assert own is not None
        return Traced(**vars(own), at=cache(at), totals=estimate.totals, positive=estimate.positive)

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> Traced:
        jackknifed = jackknife(ratio, np.stack([events, units]), units, is_share=True)
        assert jackknifed is not None, "a share always exists"
        estimate = self._traced(
            lambda other: other.present(share_interval(jackknifed, int(units.sum()), other.level), by),
            self._totals(ratio, [events, units], units),
        )
        assert estimate is not None
        return estimate

    def effective_share(self, log_ratios: Floats, by: Unit, tail: ErrorTail | None = None) -> Traced | None:
        share = super().effective_share(log_ratios, by, tail)
        assert share is None or isinstance(share, Traced)
        if share is None or by == "token":
            return share
        return self._traced(lambda other: other.effective_share(log_ratios, by), share.totals)

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
        def at(level: float, times: float = 1.0) -> Estimate | None:
            return make(Estimator(self.sequences, level, times))

        estimate = at(self.level)
        if estimate is None:
            return None
        return Traced(**vars(estimate), at=cache(at), totals=totals, positive=positive)

    @cached_property
    def _clusters(self) -> Ints:
        return np.unique(self.sequences.clusters)

    def _totals(self, function: Function, columns: Sequence[Floats], units: Floats) -> Totals:
        return Totals(function, np.stack(columns), units, self._clusters)


def traced_metrics(
    pair: TokenPair, level: float = 0.95, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """`pair_metrics` with every estimate traced that has an interval."""
    return metrics_of(pair, TracingEstimator(pair.sequences, level), names)


def without_trace(estimate: Estimate) -> Estimate:
    """The estimate without its trace, as records keep it."""
    return Estimate(**{field.name: getattr(estimate, field.name) for field in fields(Estimate)})
