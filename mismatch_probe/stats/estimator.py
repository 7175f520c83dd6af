"""Estimates of one pair: each value gets its interval and its counts. Contrasts compare two estimates or sides.

Errors are differences of log-probs in nats; a relative error of a log-probability has no meaning near 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mismatch_probe.stats.intervals import (
    Function,
    Interval,
    Scale,
    correlation,
    interval,
    jackknife,
    ratio,
    share_interval,
    squared_variation,
    variance,
)
from mismatch_probe.stats.results import LEVEL, Blame, Estimate, Unit
from mismatch_probe.stats.sequences import Array, Floats, Mask, Reals, Sequences, TokenPair, difference
from mismatch_probe.stats.tails import ErrorTail, TermFunction, relative_excess, squared_excess, with_hidden_tail

Monotone = Callable[[Any], Any]
"""A function of a number, or of each number of an array."""

LazyMetrics = dict[str, Callable[[], Estimate | str | None]]
"""The function that computes each metric: an estimate, the reason why there is none, or None beyond a float64."""


@dataclass(frozen=True)
class Estimator:
    """Makes an `Estimate` of token values [T] or sequence values [N]; None where the value does not exist."""

    sequences: Sequences
    level: float = LEVEL
    times: float = 1.0
    """Bounds are those that a sample so many times as large would have at the same value."""

    @cached_property
    def _token_counts(self) -> Floats:
        return self.sequences.sum_by_cluster(self.sequences.lengths)

    @cached_property
    def _sequence_counts(self) -> Floats:
        return self.sequences.sum_by_cluster(np.ones(self.sequences.num_sequences))

    def of_part(self, mask: Mask, lengths: Array) -> "Estimator":
        """The estimator of some sequences [N] with so many tokens each (`lengths`)."""
        return Estimator(Sequences.of_lengths(lengths, self.sequences.clusters[mask]), self.level)

    def totals(self, values: Reals | Mask, by: Unit) -> Floats:
        """Cluster totals [G] of token values [T] or sequence values [N]."""
        return self.sequences.sum_by_cluster(self.sequences.sum_by_sequence(values) if by == "token" else values)

    def counts(self, by: Unit) -> Floats:
        """Tokens or sequences of each cluster [G]."""
        return self._token_counts if by == "token" else self._sequence_counts

    def present(self, bounds: Interval, by: Unit) -> Estimate:
        """An interval with the counts of this sample."""
        n, t = self.sequences.num_sequences, self.sequences.num_tokens
        num_prompts, tail_bound = self.sequences.num_clusters, bounds.tail_bound
        return Estimate(bounds.value, bounds.low, bounds.high, self.level, n, t, by, num_prompts, tail_bound)

    def bare(self, value: float, by: Unit) -> Estimate:
        """A value for which no honest interval exists (an extreme)."""
        return self.present(Interval(float(value), None, None), by)

    def smooth(
        self, function: Function, columns: Sequence[Floats], by: Unit, scale: Scale = Scale.SIGNED
    ) -> Estimate | None:
        """A smooth function of cluster totals, each [G]."""
        estimate = jackknife(function, np.stack(columns), self.counts(by))
        return None if estimate is None else self.present(interval(estimate, scale, self.level, self.times), by)

    def mean(self, values: Reals, by: Unit, scale: Scale = Scale.SIGNED) -> Estimate | None:
        """Ratio estimator of a mean over tokens or sequences [Cochran 1977, Sampling Techniques, section 6.4]."""
        return self.smooth(ratio, [self.totals(values, by), self.counts(by)], by, scale)

    def with_rest(self, estimate: Estimate | None, tail: ErrorTail | None, terms: TermFunction) -> Estimate | None:
        """An estimate of the mean of `terms` of abs(d), with what tokens too rare for the sample may add."""
        if estimate is None or estimate.high is None or tail is None:
            return estimate
        bound = estimate.high if estimate.tail_bound is None else estimate.tail_bound
        bound += tail.rest(terms, self.level, self.times)
        if tail.scales is not None:
            bound = max(bound, estimate.high + tail.scales.rest(terms, tail.most, self.times))
        return replace(estimate, tail_bound=bound)

    def mean_of_sums(self, sums: Floats, scale: Scale = Scale.SIGNED) -> Estimate | None:
        """Mean over tokens, from the sum of each sequence [N]."""
        return self.smooth(ratio, [self.totals(sums, "sequence"), self.counts("token")], "token", scale)

    def root_mean_square(self, values: Reals, by: Unit, tail: ErrorTail | None = None) -> Estimate | None:
        square = self.with_rest(self.mean(values**2, by, Scale.POSITIVE), tail, np.square)
        return None if square is None else self.map_estimate(square, np.sqrt)

    def standard_deviation(self, values: Reals, by: Unit) -> Estimate | None:
        offsets = values - values.mean()
        columns = [self.counts(by), self.totals(offsets, by), self.totals(offsets**2, by)]
        square = self.smooth(variance, columns, by, Scale.POSITIVE)
        return None if square is None else self.map_estimate(square, np.sqrt)

    def share(self, mask: Mask, by: Unit) -> Estimate:
        """Share of tokens [T] or sequences [N] that are true."""
        return self.share_of_totals(self.totals(mask, by), self.counts(by), by)

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> Estimate:
        """Share of the units of each cluster [G] that are events [G]."""
        estimate = jackknife(ratio, np.stack([events, units]), units, is_share=True)
        assert estimate is not None, "a share always exists"
        return self.present(share_interval(estimate, int(units.sum()), self.level), by)

    def correlation(self, x: Floats, y: Floats, by: Unit) -> Estimate | None:
        """Pearson's correlation with a Fisher-z interval; None where either does not vary."""
        x, y = x - x.mean(), y - y.mean()
        columns = [self.counts(by), *(self.totals(values, by) for values in (x, y, x * x, y * y, x * y))]
        return self.smooth(correlation, columns, by, Scale.CORRELATION)

    def effective_share(self, log_ratios: Floats, by: Unit, tail: ErrorTail | None = None) -> Estimate | None:
        """ESS / n = (sum w)^2 / (n sum w^2) of weights w = e^d [Kish 1965, Survey Sampling, section 11.7].

        The interval is computed on the log of the squared coefficient of variation, so an ESS of 0.999999 keeps its
        digits. That of sequences is widened by the tail that the logs of the weights show. tail: of tokens' abs(d).
        """
        excess = relative_excess(log_ratios)
        share = self.effective_share_of_totals(
            [self.counts(by), self.totals(excess, by), self.totals(excess**2, by)], by, tail
        )
        if share is None or by == "token":
            return share
        offsets = log_ratios - log_ratios.mean()
        spread = self.mean(offsets**2, by, Scale.POSITIVE)
        return None if spread is None else with_hidden_tail(share, spread, self.sequences.num_clusters)

    def effective_share_of_totals(
        self, columns: Sequence[Floats], by: Unit, tail: ErrorTail | None = None
    ) -> Estimate | None:
        """ESS / n from the totals of each cluster [G]: units, excess and its square."""
        scale = Scale.WEIGHTS if by == "sequence" else Scale.POSITIVE
        variation = self.with_rest(self.smooth(squared_variation, columns, by, scale), tail, squared_excess)
        return None if variation is None else self.map_estimate(variation, lambda square: 1 / (1 + square))

    def map_estimate(self, estimate: Estimate, function: Monotone) -> Estimate:
        """An estimate of `smooth` under a function."""
        return map_estimate(estimate, function)

    def quantile(self, sorted_values: Reals, values: Reals, probability: float, by: Unit) -> Estimate:
        """Quantile with Woodruff's interval, from the bounds of the share below it [Woodruff 1952, JASA 47:635]."""
        value = _order_statistic(sorted_values, probability)
        share_below = self.share(values <= value, by)
        if share_below.low is None or share_below.high is None:
            return self.bare(value, by)
        shift = probability - share_below.value
        bounds = (_order_statistic(sorted_values, bound + shift) for bound in (share_below.low, share_below.high))
        return self.present(Interval(value, *bounds), by)


def _order_statistic(sorted_values: Reals, probability: float) -> float:
    """The smallest value whose empirical share is at least `probability` (Hyndman and Fan's definition 1)."""
    rank = int(np.ceil(probability * sorted_values.size)) - 1
    return float(sorted_values[min(max(rank, 0), sorted_values.size - 1)])


def map_estimate(estimate: Estimate, function: Monotone) -> Estimate:
    """An estimate and its bounds under a function."""
    value = float(function(estimate.value))
    if estimate.low is None or estimate.high is None:
        return replace(estimate, value=value)
    low, high = sorted((float(function(estimate.low)), float(function(estimate.high))))
    tail_bound = None if estimate.tail_bound is None else float(function(estimate.tail_bound))
    return replace(estimate, value=value, low=low, high=high, tail_bound=tail_bound)


def contrast(first: Estimate, second: Estimate) -> Estimate | None:
    """Ratio first / second of two positive estimates from independent samples; None where either is not positive.

    The interval recovers each log estimate's variance from its own bounds (MOVER), so it is as asymmetric as they are
    [Zou and Donner 2008, Statistics in Medicine 27:1693; Donner and Zou 2012, Stat. Methods Med. Res. 21:347]. Samples
    that share prompts are positively related, which makes it cautious.

    Raises:
        ValueError: the intervals have different levels.
    """
    if first.level != second.level:
        raise ValueError(f"intervals of levels {first.level} and {second.level} cannot be set against each other")
    if first.value <= 0 or second.value <= 0:
        return None
    low, high = None, None
    bounds = (first.low, first.high, second.low, second.high)
    if all(bound is not None and bound > 0 for bound in bounds):
        first_low, first_high, second_low, second_high = (math.log(bound) for bound in bounds if bound is not None)
        log_first, log_second = math.log(first.value), math.log(second.value)
        center = log_first - log_second
        low = math.exp(center - math.hypot(log_first - first_low, second_high - log_second))
        high = math.exp(center + math.hypot(first_high - log_first, log_second - second_low))
    return Estimate(
        value=first.value / second.value,
        low=low,
        high=high,
        level=first.level,
        num_sequences=first.num_sequences + second.num_sequences,
        num_tokens=first.num_tokens + second.num_tokens,
        by=first.by,
        num_prompts=fewer_prompts(first, second),
    )


def paired_contrast(sequences: Sequences, first: Floats, second: Floats, level: float) -> Estimate | None:
    """Ratio of the means of two positive values of the same tokens [T]; None where either mean is not positive.

    Each prompt is left out of both at once (jackknife), so what makes both large together widens nothing.
    """
    if not (first.sum() > 0 and second.sum() > 0):
        return None
    estimator = Estimator(sequences, level)
    totals = [estimator.totals(values, "token") for values in (first, second)]
    return estimator.smooth(ratio, totals, "token", Scale.RATIO)


def fewer_prompts(first: Estimate, second: Estimate) -> int | None:
    """The prompts of the sample that has fewer; None where one has no count."""
    if first.num_prompts is None or second.num_prompts is None:
        return None
    return min(first.num_prompts, second.num_prompts)


NO_REFERENCE = "there is no high-precision reference leg"


def blame(pair: TokenPair, level: float = LEVEL, why_no_reference: str = NO_REFERENCE) -> Blame:
    """Root mean square errors of both sides, their correlation, and the components of each.

    d = e_pi - e_mu, so rms(d)^2 = rms(e_pi)^2 + rms(e_mu)^2 - 2 mean(e_pi e_mu): uncorrelated errors add in squares
    [Taylor 1997, An Introduction to Error Analysis, section 3.6], and `rms_if_independent` is what they would give.
    """
    estimator = Estimator(pair.sequences, level)
    rms_difference = estimator.root_mean_square(pair.diff, "token")
    if rms_difference is None:
        raise ValueError("log-probs differ by more than a float64 can square")
    components = dict(_rms_of(_measured_contrasts(pair), estimator))
    floors = _floors_of_repeats(pair, level)
    if pair.log_ref is None:
        reasons = dict.fromkeys(("rms_error_pi", "rms_error_mu", "error_correlation", "share_pi"), why_no_reference)
        return Blame(None, None, None, rms_difference, None, None, components, floors, reasons)
    error_pi, error_mu = difference(pair.log_pi, pair.log_ref), difference(pair.log_mu, pair.log_ref)
    rms_pi, rms_mu = (estimator.root_mean_square(error, "token") for error in (error_pi, error_mu))
    correlation = estimator.correlation(error_pi, error_mu, "token")
    squares = [estimator.totals(error**2, "token") for error in (error_pi, error_mu)]
    share = estimator.smooth(lambda first, second: first / (first + second), squares, "token", Scale.SHARE)
    unavailable = {}
    if correlation is None:
        unavailable["error_correlation"] = "one side's error does not vary"
    if share is None:
        unavailable["share_pi"] = "neither side errs"
    return Blame(
        rms_error_pi=rms_pi,
        rms_error_mu=rms_mu,
        error_correlation=correlation,
        rms_difference=rms_difference,
        rms_if_independent=math.hypot(rms_pi.value, rms_mu.value) if rms_pi and rms_mu else None,
        share_pi=share,
        components=components,
        floors=floors,
        unavailable=unavailable,
    )


def _measured_contrasts(pair: TokenPair) -> Iterator[tuple[str, Reals, Reals]]:
    """Each contrast whose legs were recorded: its name and the two legs."""
    if pair.log_mu_prefill is not None:
        yield "mu_decode_vs_prefill", pair.log_mu, pair.log_mu_prefill
        yield "pi_vs_mu_prefill", pair.log_pi, pair.log_mu_prefill
    if pair.log_ref is None:
        return
    if pair.log_mu_prefill is not None:
        yield "mu_prefill", pair.log_mu_prefill, pair.log_ref
    rounded_legs = (("pi", pair.log_pi, pair.log_ref_rounded_pi), ("mu", pair.log_mu, pair.log_ref_rounded_mu))
    for side, leg, rounded_leg in rounded_legs:
        if rounded_leg is not None:
            yield f"{side}_weight_cast", rounded_leg, pair.log_ref
            yield f"{side}_arithmetic", leg, rounded_leg


def _floors_of_repeats(pair: TokenPair, level: float) -> dict[str, Estimate]:
    floors = {
        name: Estimator(repeat.sequences, level).root_mean_square(repeat.diff, "token")
        for name, repeat in pair.repeats.items()
    }
    return {name: rms for name, rms in floors.items() if rms is not None}


def _rms_of(contrasts: Iterator[tuple[str, Reals, Reals]], estimator: Estimator) -> Iterator[tuple[str, Estimate]]:
    for name, first, second in contrasts:
        rms = estimator.root_mean_square(difference(first, second), "token")
        if rms is not None:
            yield name, rms
