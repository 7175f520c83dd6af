"""Second sample against first: estimates that can be paired, slices, differences and ratios with intervals.

Both samples lose a prompt at a time together (a joint cluster jackknife), so whatever makes them move together counts:
the same tokens in both are compared in pairs, the same prompts with other responses keep the prompts' share of the
covariance, and samples without a common prompt are compared as independent ones.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Protocol

import numpy as np

from mismatch_probe.stats.estimator import Estimator, Monotone, contrast, fewer_prompts, map_estimate
from mismatch_probe.stats.intervals import Function, Scale, interval, jackknife, ratio, share_interval
from mismatch_probe.stats.metrics import metrics_of
from mismatch_probe.stats.results import LEVEL, Estimate, Unit
from mismatch_probe.stats.sequences import Array, Floats, Ints, Mask, Reals, Sequences, TokenPair, difference
from mismatch_probe.stats.tails import ErrorTail, TermFunction


@dataclass(frozen=True)
class Totals:
    """A metric as `function` of its cluster totals `columns` [K, G].

    units: tokens or sequences of each cluster [G]; clusters: their numbers [G].
    """

    function: Function
    columns: Floats
    units: Floats
    clusters: Ints


class TracedAtLevel(Protocol):
    """An estimate with its bounds at a level, as a sample so many times as large would give them."""

    def __call__(self, level: float, times: float = 1.0) -> Estimate | None: ...


@dataclass(frozen=True, kw_only=True)
class TracedEstimate(Estimate):
    """An estimate, the same at another level and with the bounds of a larger sample (`at`), and its totals; None for a
    quantile, which has none.

    positive: by nature, so that it can be so many times another.
    """

    at: TracedAtLevel
    totals: Totals | None
    positive: bool


class TracingEstimator(Estimator):
    """Makes the estimates of `Estimator`, traced; extremes stay bare."""

    def smooth(
        self, function: Function, columns: Sequence[Floats], by: Unit, scale: Scale = Scale.SIGNED
    ) -> TracedEstimate | None:
        units = self.counts(by)
        estimate = jackknife(function, np.stack(columns), units)
        if estimate is None:
            return None
        return self._trace(
            lambda other: other.present(interval(estimate, scale, other.level, other.times), by),
            self._totals(function, columns, units),
            positive=scale is not Scale.SIGNED,
        )

    def map_estimate(self, estimate: Estimate, function: Monotone) -> TracedEstimate:
        assert isinstance(estimate, TracedEstimate)
        totals = estimate.totals
        assert totals is not None, "what is smooth has totals"

        def at(level: float, times: float = 1.0) -> Estimate | None:
            other = estimate.at(level, times)
            return None if other is None else map_estimate(other, function)

        own = replace(totals, function=lambda *columns: function(totals.function(*columns)))
        return TracedEstimate(**vars(map_estimate(without_trace(estimate), function)), at=at, totals=own, positive=True)

    def with_rest(
        self, estimate: Estimate | None, tail: ErrorTail | None, terms: TermFunction
    ) -> TracedEstimate | None:
        if estimate is None:
            return None
        assert isinstance(estimate, TracedEstimate)

        def at(level: float, times: float = 1.0) -> Estimate | None:
            return Estimator(self.sequences, level, times).with_rest(estimate.at(level, times), tail, terms)

        own = Estimator(self.sequences, self.level).with_rest(without_trace(estimate), tail, terms)
        assert own is not None
        return TracedEstimate(**vars(own), at=cache(at), totals=estimate.totals, positive=estimate.positive)

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> TracedEstimate:
        with_error = jackknife(ratio, np.stack([events, units]), units, is_share=True)
        assert with_error is not None, "a share always exists"
        estimate = self._trace(
            lambda other: other.present(share_interval(with_error, int(units.sum()), other.level), by),
            self._totals(ratio, [events, units], units),
        )
        assert estimate is not None
        return estimate

    def effective_share(self, log_ratios: Floats, by: Unit, tail: ErrorTail | None = None) -> TracedEstimate | None:
        share = super().effective_share(log_ratios, by, tail)
        assert share is None or isinstance(share, TracedEstimate)
        if share is None or by == "token":
            return share
        return self._trace(lambda other: other.effective_share(log_ratios, by), share.totals)

    def quantile(self, sorted_values: Reals, values: Reals, probability: float, by: Unit) -> Estimate:
        estimate = self._trace(lambda other: other.quantile(sorted_values, values, probability, by))
        assert estimate is not None, "a quantile always exists"
        return estimate

    def _trace(
        self, make: Callable[[Estimator], Estimate | None], totals: Totals | None = None, positive: bool = True
    ) -> TracedEstimate | None:
        def at(level: float, times: float = 1.0) -> Estimate | None:
            return make(Estimator(self.sequences, level, times))

        estimate = at(self.level)
        if estimate is None:
            return None
        return TracedEstimate(**vars(estimate), at=cache(at), totals=totals, positive=positive)

    @cached_property
    def _clusters(self) -> Ints:
        return np.unique(self.sequences.clusters)

    def _totals(self, function: Function, columns: Sequence[Floats], units: Floats) -> Totals:
        return Totals(function, np.stack(columns), units, self._clusters)


def traced_metrics(
    pair: TokenPair, level: float = LEVEL, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """`pair_metrics` with every estimate traced that has an interval."""
    return metrics_of(pair, TracingEstimator(pair.sequences, level), names)


def without_trace(estimate: Estimate) -> Estimate:
    """The estimate without its trace, as records keep it."""
    return Estimate(**{field.name: getattr(estimate, field.name) for field in fields(Estimate)})


AtLevel = Callable[[float], Estimate | None]
"""An estimate with its interval at a level."""


def second_minus_first(first: Estimate, second: Estimate, level: float) -> Estimate | None:
    """second - first; None for extremes and quantiles, whose difference has no interval here."""
    if not (
        isinstance(first, TracedEstimate) and isinstance(second, TracedEstimate) and first.totals and second.totals
    ):
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
    if not (
        isinstance(first, TracedEstimate) and isinstance(second, TracedEstimate) and first.positive and second.positive
    ):
        return None
    if min(first.value, second.value) <= 0:
        return None
    if first.totals and second.totals:
        return _joint(first, second, first.totals, second.totals, np.divide, Scale.RATIO)
    return partial(_independent, first, second)


def _independent(first: TracedEstimate, second: TracedEstimate, level: float) -> Estimate | None:
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

    estimate = jackknife(of_both, columns, units)

    def at(level: float) -> Estimate | None:
        if estimate is None:
            return None
        bounds = interval(estimate, scale, level)
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


NumberRange = tuple[int, int | None]
"""From the first number up to, not including, the second; None is open."""

EVERYTHING: NumberRange = (0, None)


def part_of(
    pair: TokenPair,
    *,
    position: NumberRange = EVERYTHING,
    length: NumberRange = EVERYTHING,
    step: NumberRange = EVERYTHING,
    clip: float | None = None,
) -> TokenPair | None:
    """The tokens at some positions (from 0) of responses of some lengths and steps; None where there is none.

    clip: d is held within +-clip nats.
    """
    part: TokenPair | None = pair
    if (position, length, step) != (EVERYTHING,) * 3:
        part = pair.of_tokens(tokens_of(pair.sequences, position, length, step))
    if part is None or clip is None:
        return part
    clipped_diff = np.clip(difference(part.log_pi, part.log_mu), -clip, clip)
    return replace(part, log_pi=part.log_mu + clipped_diff, clip=clip)


def tokens_of(sequences: Sequences, position: NumberRange, length: NumberRange, step: NumberRange) -> Mask:
    """Which tokens [T] lie at these positions of responses of these lengths and steps."""
    is_chosen = _within(sequences.positions, position) & sequences.spread(_within(sequences.lengths, length))
    if step == EVERYTHING:
        return is_chosen
    if sequences.steps is None:
        return np.zeros_like(is_chosen)
    return is_chosen & sequences.spread(_within(sequences.steps, step))


def _within(values: Array, span: NumberRange) -> Mask:
    low, high = span
    return np.asarray((values >= low) & (True if high is None else values < high))
