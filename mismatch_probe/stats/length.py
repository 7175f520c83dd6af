"""The length law: deviation by position and by response length, drift, spread, and the length budget.

A budget is open where it is only an upper bound: rare values of S that the sample does not show may shorten it.

The ESS at a length counts that responses have different error rates. A response of rate q (1 on average) has an S that
is close to normal, with variance q V and mean m q V at a length; over all responses S has the variance
V + (m V)^2 Var(q). Then ESS / n = (E e^S)^2 / E e^(2 S) = M((m + 1/2) V)^2 / M((2 m + 2) V) with M(c) = E e^(c q), a
mean over the sample. Equal rates (q = 1) give exp(-V) for every m, the share of log-normal weights [Kong, Liu and Wong
1994, JASA 89:278]; different rates lose more, and sooner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.stats.bins import PositionGrid, confidence_curves, curve, group_by_label, log_ends, quantiles_of_bin
from mismatch_probe.stats.estimator import Estimator, map_estimate
from mismatch_probe.stats.intervals import ROUNDING, Scale
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import LEVEL, AtLength, CurveBin, Estimate, LengthLaw
from mismatch_probe.stats.sequences import Floats, Ints, TokenPair
from mismatch_probe.stats.spread import FEWEST_SEQUENCES, Errors, fit_spread
from mismatch_probe.stats.tails import RARE_UP_TO, error_tail

_POINTS: Final = 96
_LOW, _HIGH = -0.5, 3.0
"""The exponents c of the table, over ln(1 / ESS): m is between -1 and 1/2."""
_TRIALS: Final = 64
_LEAST, _MOST = 1e-3, 1.15
"""Trial values of V, over ln(1 / ESS)."""
DRIFT_KNOWN: Final = 4.0
"""The prior for m: -1/2, as tokens sampled from mu have it (E e^d = 1), weighs as much as this summed variance of S."""


def relative_rates(squares: Floats, fourths: Floats, counts: Floats) -> Floats:
    """The rate q of each response [N], 1 on average: its mean of d^2 over the mean at its positions.

    squares, fourths, counts: sums of d^2, of d^4 and of tokens in each bin of positions [N, K]. Rates are shrunk
    towards 1, so that the noise of their tokens adds nothing to their variance.
    """
    tokens, sums = counts.sum(axis=0), squares.sum(axis=0)
    usable = (tokens > 0) & (sums > 0)
    means = sums[usable] / tokens[usable]
    lengths = counts[:, usable].sum(axis=1)
    if not usable.any():
        return np.ones(counts.shape[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (squares[:, usable] / means).sum(axis=1) / lengths
        noise = ((fourths[:, usable] / means**2).sum(axis=1) / lengths - rates**2) / lengths
    has_tokens = lengths > 0
    spread, noise_variance = float(rates[has_tokens].var()), float(noise[has_tokens].mean())
    shrinkage = math.sqrt(max(1 - noise_variance / spread, 0.0)) if spread > 0 else 0.0
    return np.where(has_tokens, 1 + shrinkage * (rates - 1), 1.0)


@dataclass(frozen=True)
class Mixture:
    """The rates [N] and the table of exponents [C] for one effective share."""

    rates: Floats
    ess: float

    @property
    def exponents(self) -> Floats:
        return math.log(1 / self.ess) * np.linspace(_LOW, _HIGH, _POINTS)

    def columns(self, sums: Floats, squares: Floats) -> Floats:
        """The columns of each response [N, C + 5] whose totals `log_variance` reads, from its S and sum of d^2."""
        table = np.exp(self.rates[:, None] * self.exponents)
        return np.column_stack([np.ones(sums.size), self.rates, self.rates**2, sums, squares, table])

    def log_variance(self, columns: Sequence[Floats]) -> Floats:
        """log of the Var(S) at which ESS / n falls to the wanted share [G], from totals [C + 5, G]."""
        log_share, log_variances = self._log_shares(np.stack(columns))
        log_target, log_loss = math.log(math.log(1 / self.ess)), np.log(-log_share)
        last = np.clip((log_loss < log_target).sum(axis=0) - 1, 0, _TRIALS - 2)
        samples = np.arange(last.size)
        x, next_x = log_loss[last, samples], log_loss[last + 1, samples]
        y, next_y = log_variances[last, samples], log_variances[last + 1, samples]
        return np.asarray(y + (log_target - x) * (next_y - y) / (next_x - x))

    def share(self, columns: Sequence[Floats], log_variance: Floats) -> Floats:
        """ESS / n of the first sample at Var(S) [K]."""
        log_share, log_variances = self._log_shares(np.stack(columns))
        variances = np.r_[0, np.exp(log_variances[:, 0])]
        return np.asarray(np.exp(np.interp(np.exp(log_variance), variances, np.r_[0, log_share[:, 0]])))

    def _log_shares(self, totals: Floats) -> tuple[Floats, Floats]:
        """log(ESS / n) and log Var(S) [K, G] at K trial values of V."""
        count, rates, squared_rates, sums, squares = totals[:5]
        drift = np.clip((sums - DRIFT_KNOWN / 2) / (squares + DRIFT_KNOWN), -1.0, 0.5)
        log_mean = np.log(totals[5:] / count)
        within = math.log(1 / self.ess) * np.geomspace(_LEAST, _MOST, _TRIALS)[:, None]
        scale = within / (rates / count)
        between = (drift * scale) ** 2 * (squared_rates / count - (rates / count) ** 2)
        log_share = 2 * self._log_mean_at(log_mean, (drift + 0.5) * scale) - self._log_mean_at(
            log_mean, (2 * drift + 2) * scale
        )
        return log_share, np.log(within + between)

    def _log_mean_at(self, log_mean: Floats, exponents: Floats) -> Floats:
        """log M [K, G] at exponents [K, G], by linear interpolation in the table [C, G]."""
        place = (exponents / math.log(1 / self.ess) - _LOW) / (_HIGH - _LOW) * (_POINTS - 1)
        first: Ints = np.clip(place.astype(np.int64), 0, _POINTS - 2)
        samples = np.arange(log_mean.shape[1])
        low, high = log_mean[first, samples], log_mean[first + 1, samples]
        return np.asarray(low + (place - first) * (high - low))


LOG_BOUND = 20.0


def relative_excess(log_ratios: Floats) -> Floats:
    """w / c - 1 for w = e^d, where only the weights' shares matter.

    c is 1, which is exact for tiny d; where a weight is beyond e^20 it is the largest weight, so that no sum overflows
    and no weight is bounded.
    """
    is_beyond = np.abs(log_ratios).max(initial=0.0) > LOG_BOUND
    return np.asarray(np.expm1(log_ratios - log_ratios.max() if is_beyond else log_ratios))


def squared_excess(log_ratios: Floats) -> Floats:
    """(w - 1)^2 for w = e^d."""
    return np.asarray(np.expm1(log_ratios) ** 2)


def with_hidden_tail(share: Estimate, log_weight_variance: Estimate, num_clusters: int) -> Estimate:
    """An effective share whose interval also contains that of log-normal weights [Kong, Liu and Wong 1994].

    Log-normal weights have the share exp(-variance), with the variance of the log-weights [JASA 89:278]. A few weights
    decide the share, and a sample without the largest ones shows a share that is too large and too certain; the logs
    of all weights show that larger ones must exist. A variance about the sample's own mean is too small by up to 1 in
    the number of clusters.
    """
    if share.low is None or share.high is None:
        return share
    if log_weight_variance.low is None or log_weight_variance.high is None:
        return replace(share, low=0.0, high=1.0)
    low = math.exp(-log_weight_variance.high * num_clusters / (num_clusters - 1))
    return replace(share, low=min(share.low, low), high=max(share.high, math.exp(-log_weight_variance.low)))


_LEVEL: Final = 0.9
_FOUR_ERRORS_WIDE: Final = 0.95
"""The level of an interval that is four standard errors wide, whatever level the user gives to other intervals."""
_SHARE_OF_LOSS: Final = 0.25


def tokens_are_open(pair: TokenPair, estimator: Estimator) -> bool:
    """Whether tokens too rare for the sample may double E (w - 1)^2, and with it the loss."""
    bounded_diff = np.minimum(pair.abs_diff, RARE_UP_TO)
    tail = error_tail(bounded_diff, lambda values: estimator.totals(values, "token"), RARE_UP_TO)
    return tail is not None and tail.rest(squared_excess, _LEVEL) > float(squared_excess(bounded_diff).mean())


def shape_is_open(estimator: Estimator, sums: Floats, ess: float, times_beyond: float) -> bool:
    """Whether the skewness of S [N] at the budget may account for a quarter of the loss that defines the budget.

    times_beyond: the budget over the length of the sums. To third order ln ESS is -Var(S) less the third cumulant;
    beyond the data a bias of each response makes the skewness grow with the length to the power 1.5.
    """
    offsets = sums - sums.mean()
    powers = [estimator.counts("sequence"), *(estimator.totals(offsets**power, "sequence") for power in (1, 2, 3))]
    skewness = replace(estimator, level=_FOUR_ERRORS_WIDE).smooth(_skewness, powers, "sequence")
    if skewness is None or skewness.low is None or skewness.high is None:
        return True
    error = (skewness.high - skewness.low) / 4
    loss = math.log(1 / ess)
    third_cumulant = (abs(skewness.value) + error) * max(times_beyond, 1.0) ** 1.5 * loss**1.5
    return bool(third_cumulant > _SHARE_OF_LOSS * loss)


def _skewness(count: Floats, sums: Floats, squares: Floats, cubes: Floats) -> Floats:
    mean, square, cube = sums / count, squares / count, cubes / count
    spread = np.maximum(square - mean**2, ROUNDING * square)
    return np.asarray((cube - 3 * mean * square + 2 * mean**3) / spread**1.5)


def length_law(pair: TokenPair, ess: float = 0.5, level: float = LEVEL) -> LengthLaw:
    """Deviation against length of one pair; what the data cannot tell is None, with the reason in `unavailable`.

    Tokens come from mu, so E S = -KL per token: the drift is the slope through the origin. Log-normal weights keep
    ESS / n = exp(-Var S), and small independent errors give Var S near 2 KL T, hence the closed form
    ln(1 / ess) / (2 KL) beside the fitted budget.

    Raises:
        ValueError: `ess` is not between 0 and 1.
    """
    if not 0 < ess < 1:
        raise ValueError(f"the effective share to keep is {ess}; it lies between 0 and 1")
    estimator = Estimator(pair.sequences, level)
    longest = int(pair.sequences.lengths.max())
    grid = PositionGrid(pair.sequences, np.array(log_ends(longest)))
    errors = Errors.of(grid, pair.diff)
    prefix_sums = np.cumsum(errors.sums, axis=1)
    fit = fit_spread(estimator, grid, errors, ess)
    closed_form = _closed_form_budget(pair, estimator, ess)
    no_closed_form = {} if closed_form else {"budget_closed_form": "KL is 0, or beyond a float64"}
    by_position = curve(
        estimator,
        grid.bounds,
        group_by_label(pair.abs_diff, grid.labels(), grid.ends.size),
        grid.sums(pair.abs_diff),
        grid.counts,
    )
    return LengthLaw(
        abs_diff_by_position=by_position,
        cumulative_diff_by_position=_cumulative(estimator, grid, prefix_sums),
        abs_diff_by_response_length=_by_response_length(pair, estimator, grid),
        drift_per_1000=estimator.mean(1000 * pair.diff, "token"),
        spread_coefficient=fit.coefficient,
        spread_exponent=fit.exponent,
        budget_ess=ess,
        budget_tokens=fit.budget,
        budget_closed_form=closed_form,
        measured_up_to=longest,
        median_response=float(np.median(pair.sequences.lengths)),
        budget_tail_is_open=fit.budget is not None
        and _budget_is_open(pair, estimator, grid, prefix_sums, ess, fit.budget.value, fit.fitted_up_to or longest),
        longest_budget_is_extrapolated=fit.budget is not None and fit.budget.value > longest,
        fitted_from=fit.fitted_from,
        fitted_up_to=fit.fitted_up_to,
        ess_at_budget=None if fit.budget is None else _ess_at(pair, estimator, fit.budget.value),
        ess_by_length=_ess_by_length(estimator, grid, prefix_sums),
        fitted_ess=fit.ess,
        by_confidence=confidence_curves(pair, estimator),
        unavailable=fit.unavailable | no_closed_form,
    )


def _budget_is_open(
    pair: TokenPair,
    estimator: Estimator,
    grid: PositionGrid,
    prefix_sums: Floats,
    ess: float,
    budget: float,
    fitted_up_to: int,
) -> bool:
    """Whether the budget is only an upper bound, by the tail of tokens or by the shape of S.

    The shape is that at the end of the fit, or at the budget where that comes first.
    """
    number = int(np.searchsorted(grid.ends, min(budget, fitted_up_to)))
    sums = prefix_sums[grid.reached[:, number], number]
    part = _responses_cut_at(estimator, grid, number)
    return tokens_are_open(pair, estimator) or shape_is_open(part, sums, ess, budget / float(grid.ends[number]))


def _closed_form_budget(pair: TokenPair, estimator: Estimator, ess: float) -> Estimate | None:
    divergence = estimator.mean(k3_terms(pair.diff), "token", Scale.POSITIVE)
    if divergence is None or not divergence.value > 0:
        return None
    return map_estimate(divergence, lambda kl: math.log(1 / ess) / (2 * kl))


def _cumulative(estimator: Estimator, grid: PositionGrid, prefix_sums: Floats) -> list[CurveBin]:
    """The sum of d over the first `high` tokens of the responses that have as many."""
    bins = []
    for number, (low, high, _) in enumerate(grid.bounds):
        rows = grid.reached[:, number]
        sums = prefix_sums[rows, number]
        mean = _responses_cut_at(estimator, grid, number).mean(sums, "sequence")
        if mean is not None:
            bins.append(CurveBin(low, high, high, mean, *quantiles_of_bin(sums)))
    return bins


def _by_response_length(pair: TokenPair, estimator: Estimator, grid: PositionGrid) -> list[CurveBin]:
    """Mean abs(d) over the tokens of responses of like length; quantiles are over the means of single responses."""
    lengths = pair.sequences.lengths
    sums = pair.sequences.sum_by_sequence(pair.abs_diff)
    bin_of_sequence = np.searchsorted(grid.ends, lengths)
    bins = []
    for number in np.unique(bin_of_sequence):
        in_bin = bin_of_sequence == number
        mean = estimator.of_part(in_bin, lengths[in_bin]).mean_of_sums(sums[in_bin], Scale.POSITIVE)
        if mean is not None:
            low, high, _ = grid.bounds[number]
            middle = float(np.median(lengths[in_bin]))
            bins.append(CurveBin(low, high, middle, mean, *quantiles_of_bin(sums[in_bin] / lengths[in_bin])))
    return bins


def _ess_by_length(estimator: Estimator, grid: PositionGrid, prefix_sums: Floats) -> list[AtLength]:
    bins = []
    for number, end in enumerate(grid.ends):
        rows = grid.reached[:, number]
        if rows.sum() >= FEWEST_SEQUENCES:
            ess = _responses_cut_at(estimator, grid, number).effective_share(prefix_sums[rows, number], "sequence")
            if ess is not None:
                bins.append(AtLength(int(end), ess))
    return bins


def _ess_at(pair: TokenPair, estimator: Estimator, budget: float) -> Estimate | None:
    """ESS measured at the budget itself; None where fewer than 16 responses are as long."""
    longest = int(pair.sequences.lengths.max())
    if not 1 <= budget < longest:
        return None
    grid = PositionGrid(pair.sequences, np.array([int(budget), longest]))
    at_budget = _ess_by_length(estimator, grid, np.cumsum(grid.sums(pair.diff), axis=1))
    return at_budget[0].estimate if at_budget and at_budget[0].num_tokens == int(budget) else None


def _responses_cut_at(estimator: Estimator, grid: PositionGrid, number: int) -> Estimator:
    """The responses that reach an end of the grid, cut there."""
    rows = grid.reached[:, number]
    return estimator.of_part(rows, np.full(int(rows.sum()), grid.ends[number]))
