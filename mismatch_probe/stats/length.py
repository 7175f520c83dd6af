"""The length law: deviation by position and by response length, drift, spread, and the length budget.

A budget is open where it is only an upper bound: rare values of S that the sample does not show may shorten it.
"""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from mismatch_probe.stats.bins import PositionGrid, confidence_curves, curve, group_by_label, log_ends, quantiles_of_bin
from mismatch_probe.stats.estimator import Estimator, map_estimate
from mismatch_probe.stats.intervals import ROUNDING, Scale
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import LEVEL, AtLength, CurveBin, Estimate, LengthLaw
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.spread import FEWEST_SEQUENCES, Errors, fit_spread
from mismatch_probe.stats.tails import RARE_UP_TO, error_tail, squared_excess

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
