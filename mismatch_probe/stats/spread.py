"""The law of spread, Var(S | T) = a τ(T)^b: the growth of the spread of S with length, and the length budget.

It is computed from totals, for many jackknife samples at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from mismatch_probe.stats.bins import PositionGrid
from mismatch_probe.stats.estimator import Estimator, map_estimate
from mismatch_probe.stats.intervals import Function, Scale
from mismatch_probe.stats.results import Estimate, FittedEss
from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.stats.tails import Mixture, relative_rates

_ROUNDING = 1e-9
_LARGEST_LOG = 300.0


@dataclass(frozen=True)
class LawContinuation:
    """A continuation of the law beyond the data: τ keeps the slope of its last octaves."""

    keeps: Literal["growth", "rate"]
    """The slope is that of log τ in log T (`growth`) or that of τ in T (`rate`)."""
    octaves: int
    as_bias: bool = False
    """A bias of each response makes the exponent more than 1: beyond the data the variance is that of a random walk and
    a bias, a τ + c τ^2, with the value and the slope that it has at the end of the data.
    """


@dataclass(frozen=True)
class Law:
    """log a and b [G], and log τ [K, G] at the logs of K lengths, for G samples."""

    log_a: Floats
    b: Floats
    log_tau: Floats
    log_lengths: Floats

    def log_length(self, log_variance: float | Floats, continuation: LawContinuation) -> Floats:
        """log of the length at which the variance is reached [G]; τ is interpolated between the measured lengths."""
        target = np.asarray((log_variance - self.log_a) / self.b)
        if continuation.as_bias:
            target = np.where(target > self.log_tau[-1], self._log_tau_as_bias(log_variance), target)
        index = np.clip((self.log_tau <= target).sum(axis=0) - 1, 0, self.log_lengths.size - 2)
        samples = np.arange(index.size)
        x, next_x = self.log_tau[index, samples], self.log_tau[index + 1, samples]
        y, next_y = self.log_lengths[index], self.log_lengths[index + 1]
        within = y + (target - x) * (next_y - y) / (next_x - x)
        return np.where(target > self.log_tau[-1], self._log_length_beyond(target, continuation), within)

    def log_variance(self, log_length: float, continuation: LawContinuation) -> float:
        """log of the first sample's variance at a length."""
        last = float(self.log_lengths[-1])
        log_tau = float(np.interp(log_length, self.log_lengths, self.log_tau[:, 0]))
        if log_length > last:
            slope = float(self._growth_slope(continuation)[0])
            step = log_length - last
            log_tau += slope * step if continuation.keeps == "growth" else math.log1p(slope * math.expm1(step))
        return float(self.log_a[0] + self.b[0] * log_tau)

    def _log_tau_as_bias(self, log_variance: float | Floats) -> Floats:
        """log τ at which (2 - b) y + (b - 1) y^2 = Var / Var(end), y = τ / τ(end)."""
        last = self.log_tau[-1]
        ratio = np.exp(np.minimum(log_variance - (self.log_a + self.b * last), _LARGEST_LOG))
        walk, bias = 2 - np.clip(self.b, 1, 2), np.clip(self.b, 1, 2) - 1
        return np.asarray(last + np.log(2 * ratio / (walk + np.sqrt(walk**2 + 4 * bias * ratio))))

    def _log_length_beyond(self, log_tau: Floats, continuation: LawContinuation) -> Floats:
        step = log_tau - self.log_tau[-1]
        slope = self._growth_slope(continuation)
        onward = step / slope if continuation.keeps == "growth" else np.log1p(np.expm1(step) / slope)
        return np.asarray(self.log_lengths[-1] + onward)

    def _growth_slope(self, continuation: LawContinuation) -> Floats:
        """The slope that `continuation` keeps, that of τ in T relative to their last values [G]; 1 for equal errors."""
        start = self.log_lengths[-1] - continuation.octaves * math.log(2)
        first = min(int(np.searchsorted(self.log_lengths, start - _ROUNDING)), self.log_lengths.size - 2)
        rise, run = self.log_tau[-1] - self.log_tau[first], self.log_lengths[-1] - self.log_lengths[first]
        return np.asarray(rise / run if continuation.keeps == "growth" else np.expm1(-rise) / np.expm1(-run))


@dataclass(frozen=True)
class Prefixes:
    """The lengths at which totals were taken."""

    ends: Ints
    """The ends of adjacent bins from the first token on [J]."""
    fitted: Ints
    """The indices of the ends that the law is fitted to [K]."""
    weights: Floats
    """The weights of the fitted lengths [K]."""

    def law(self, columns: Sequence[Floats]) -> Law:
        """The law of totals [3 K + 2 J, G]: number, S and S^2 of the responses that reach each fitted length, then d^2
        and tokens of each bin.
        """
        num_fitted = self.fitted.size
        totals = np.stack(columns)
        count, total, squares = totals[: 3 * num_fitted].reshape(3, num_fitted, -1)
        errors, tokens = totals[3 * num_fitted :].reshape(2, self.ends.size, -1)
        log_variance = np.log((squares - total**2 / count) / (count - 1))
        widths = np.diff(self.ends, prepend=0)[:, None]
        mean_square = errors.sum(axis=0) / tokens.sum(axis=0)
        log_tau = np.log(np.cumsum(errors / tokens * widths, axis=0)[self.fitted] / mean_square)
        share = (self.weights / self.weights.sum())[:, None]
        center = (share * log_tau).sum(axis=0)
        b = (share * (log_tau - center) * log_variance).sum(axis=0) / (share * (log_tau - center) ** 2).sum(axis=0)
        log_a = (share * log_variance).sum(axis=0) - b * center
        return Law(log_a, b, log_tau, np.log(self.ends[self.fitted]))


FEWEST_SEQUENCES = 16
FEWEST_SHARE = 0.1
LEAST_RANGE = 4
RANGE_OF_FIT = 64
CONTINUATIONS = (
    LawContinuation("growth", 1),
    LawContinuation("growth", 2),
    LawContinuation("rate", 1),
    LawContinuation("growth", 1, as_bias=True),
)
"""The possible continuations of the law: the budget is that of the first, its interval contains those of all."""
FARTHEST_EXTRAPOLATION = 1000
LARGEST_LOG_BOUND = 100.0
DRAWN_BEYOND = 3
DRAWN_POINTS = 48


@dataclass(frozen=True)
class SpreadFit:
    """Var(S | T) = coefficient * τ(T)^exponent between two lengths, and the T at which ESS / n is the wanted share."""

    fitted_from: int | None = None
    fitted_up_to: int | None = None
    coefficient: Estimate | None = None
    exponent: Estimate | None = None
    budget: Estimate | None = None
    ess: list[FittedEss] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Errors:
    """The sums of d and of its powers over each sequence's tokens in each bin of the grid [N, K]."""

    sums: Floats
    squares: Floats
    fourths: Floats

    @classmethod
    def of(cls, grid: PositionGrid, diff: Floats) -> "Errors":
        squares = diff**2
        return cls(grid.sums(diff), grid.sums(squares), grid.sums(squares**2))


def fit_spread(estimator: Estimator, grid: PositionGrid, errors: Errors, ess: float) -> SpreadFit:
    """Fit a power law of the variance of the cumulative sum of d over the length τ.

    τ(T) counts the first T tokens by the mean square of d at their positions, over that of all tokens: it is T where
    every position has the same error, and grows more slowly where later tokens have smaller errors. So the exponent
    shows the dependence of a response's errors, from a random walk (1) to a bias of each response (2), as in the
    variance-time plot of long-memory processes [Beran 1994, Statistics for Long-Memory Processes, 4.4], and not where
    they are large.

    Every prefix length counts, so the fit needs no spread of response lengths. It is by least squares on logs, each
    length weighted by the number of sequences that reach it. ESS / n at a variance is that of a mixture over the error
    rates of responses. The interval of a budget beyond the data contains those of several continuations.
    """
    prefix_sums = np.cumsum(errors.sums, axis=1)
    ends_to_fit = _lengths_to_fit(grid, prefix_sums)
    ends = grid.ends[ends_to_fit]
    if ends.size < 3 or ends[-1] < LEAST_RANGE * ends[0]:
        return _no_fit(f"fewer than {FEWEST_SEQUENCES} responses are long enough to fit a range of lengths")
    prefixes, by_cluster = _totals_to_fit(estimator, grid, ends_to_fit, prefix_sums, errors.squares)
    mixture, of_mixture = _mixture_of_rates(estimator, grid, errors, ess)
    coefficient = estimator.smooth(
        lambda *columns: np.exp(prefixes.law(columns).log_a), by_cluster, "sequence", Scale.POSITIVE
    )
    exponent = estimator.smooth(lambda *columns: prefixes.law(columns).b, by_cluster, "sequence")
    if coefficient is None or exponent is None:
        return _no_fit("the summed log-ratio does not vary between responses")
    fit = SpreadFit(int(ends[0]), int(ends[-1]), coefficient, exponent)
    log_budget = None
    if exponent.low is not None and exponent.low > 0:
        log_budget = _log_budget(estimator, prefixes, by_cluster, mixture, of_mixture)
    if log_budget is None or log_budget.high is None or log_budget.high > LARGEST_LOG_BOUND:
        return replace(fit, unavailable={"budget_tokens": "the spread is not seen to grow with length"})
    if log_budget.value > math.log(FARTHEST_EXTRAPOLATION * ends[-1]):
        reason = f"it lies more than {FARTHEST_EXTRAPOLATION:,} times beyond the {ends[-1]:,} tokens measured"
        return replace(fit, unavailable={"budget_tokens": reason})
    budget = map_estimate(log_budget, math.exp)
    farthest = DRAWN_BEYOND * max(budget.value, float(ends[-1]))
    return replace(fit, budget=budget, ess=_fitted_ess(prefixes, by_cluster, mixture, of_mixture, farthest))


def _no_fit(reason: str) -> SpreadFit:
    return SpreadFit(unavailable=dict.fromkeys(("spread_coefficient", "spread_exponent", "budget_tokens"), reason))


def _lengths_to_fit(grid: PositionGrid, prefix_sums: Floats) -> Ints:
    """The indices of the ends within the last factor of 64 that enough sequences reach and at which S varies."""
    num_reached = grid.reached.sum(axis=0)
    enough = num_reached >= max(FEWEST_SEQUENCES, FEWEST_SHARE * grid.sequences.num_sequences)
    longest = int(grid.ends[enough].max(initial=0))
    numbers = np.flatnonzero(enough & (grid.ends * RANGE_OF_FIT >= longest) & (grid.ends > 1))
    varies = [np.ptp(prefix_sums[grid.reached[:, number], number]) > 0 for number in numbers]
    return np.asarray(numbers[np.array(varies, dtype=bool)])


def _totals_to_fit(
    estimator: Estimator, grid: PositionGrid, ends_to_fit: Ints, prefix_sums: Floats, squares: Floats
) -> tuple[Prefixes, list[Floats]]:
    """The lengths to fit, and each cluster's totals as `Prefixes.law` reads them."""
    num_bins = int(ends_to_fit[-1]) + 1
    rows = grid.reached[:, ends_to_fit]
    sums = np.where(rows, prefix_sums[:, ends_to_fit], 0.0)
    columns = np.hstack([rows, sums, sums**2, squares[:, :num_bins], grid.counts[:, :num_bins]])
    prefixes = Prefixes(grid.ends[:num_bins], ends_to_fit, rows.sum(axis=0).astype(np.float64))
    return prefixes, [estimator.totals(column, "sequence") for column in columns.T]


def _mixture_of_rates(
    estimator: Estimator, grid: PositionGrid, errors: Errors, ess: float
) -> tuple[Mixture, list[Floats]]:
    """The mixture, and each cluster's totals of it."""
    mixture = Mixture(relative_rates(errors.squares, errors.fourths, grid.counts), ess)
    columns = mixture.columns(errors.sums.sum(axis=1), errors.squares.sum(axis=1))
    return mixture, [estimator.totals(column, "sequence") for column in columns.T]


def _log_budget(
    estimator: Estimator,
    prefixes: Prefixes,
    by_cluster: Sequence[Floats],
    mixture: Mixture,
    of_mixture: Sequence[Floats],
) -> Estimate | None:
    """log of the length at which ESS / n is the wanted share; the interval contains those of all continuations."""
    width = len(by_cluster)

    def solve(continuation: LawContinuation) -> Function:
        return lambda *columns: prefixes.law(columns[:width]).log_length(
            mixture.log_variance(columns[width:]), continuation
        )

    all_columns = [*by_cluster, *of_mixture]
    first, *others = (estimator.smooth(solve(continuation), all_columns, "sequence") for continuation in CONTINUATIONS)
    if first is None or first.low is None or first.high is None:
        return first
    low = min(first.low, *(other.low for other in others if other is not None and other.low is not None))
    high = max(first.high, *(other.high for other in others if other is not None and other.high is not None))
    return replace(first, low=low, high=high)


def _fitted_ess(
    prefixes: Prefixes, by_cluster: Sequence[Floats], mixture: Mixture, of_mixture: Sequence[Floats], farthest: float
) -> list[FittedEss]:
    """ESS / n by the fit from its first length to the farthest."""
    law = prefixes.law([column.sum(keepdims=True) for column in by_cluster])
    log_lengths = np.linspace(math.log(prefixes.ends[prefixes.fitted[0]]), math.log(farthest), DRAWN_POINTS)
    log_variances = np.array([law.log_variance(x, CONTINUATIONS[0]) for x in log_lengths])
    shares = mixture.share([column.sum(keepdims=True) for column in of_mixture], log_variances)
    return [FittedEss(math.exp(x), float(share)) for x, share in zip(log_lengths, shares, strict=True)]
