"""How the spread of S grows with length, and the length at which sequence-level importance sampling stops paying."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mismatch_probe.stats.bins import PositionGrid
from mismatch_probe.stats.estimator import Estimator, mapped
from mismatch_probe.stats.intervals import Function, Scale
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Mask

FEWEST_SEQUENCES = 16
FEWEST_SHARE = 0.1
LEAST_RANGE = 4
RANGE_OF_FIT = 64
FARTHEST_EXTRAPOLATION = 1000
LARGEST_LOG_BOUND = 100.0


@dataclass(frozen=True)
class SpreadFit:
    """Var(S | T) = coefficient * T^exponent between two lengths, and the T where exp(-Var) meets the asked share."""

    fitted_from: int | None = None
    fitted_up_to: int | None = None
    coefficient: Estimate | None = None
    exponent: Estimate | None = None
    budget: Estimate | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


def fit_spread(estimator: Estimator, grid: PositionGrid, prefix_sums: Floats, ess: float) -> SpreadFit:
    """Power law of the variance of the cumulative sum of d over its length.

    prefix_sums: [N, K], sum of d over each sequence's tokens up to each end of the grid. Every prefix length counts, so
    the fit needs no spread of response lengths. The exponent tells a random walk (1) from a bias of each sequence (2),
    as in the variance-time plot of long-memory processes [Beran 1994, Statistics for Long-Memory Processes, 4.4].
    exp(-Var) is ESS / n for log-normal weights [Kong, Liu and Wong 1994, JASA 89:278]. Least squares on logs, each
    length weighted by the number of sequences that reach it.
    """
    chosen = _lengths_to_fit(grid)
    ends = grid.ends[chosen]
    if ends.size < 3 or ends[-1] < LEAST_RANGE * ends[0]:
        return _unfitted(f"fewer than {FEWEST_SEQUENCES} responses are long enough to fit a range of lengths")
    reached = grid.reached[:, chosen]
    sums = np.where(reached, prefix_sums[:, chosen], 0.0)
    by_cluster = [estimator.totals(column, "sequence") for column in np.hstack([reached, sums, sums**2]).T]
    weights = reached.sum(axis=0).astype(np.float64)

    def fit(read: Callable[[Floats, Floats], Floats]) -> Function:
        return lambda *columns: read(*_power_law(np.stack(columns), np.log(ends), weights))

    coefficient = estimator.smooth(fit(lambda log_a, b: np.exp(log_a)), by_cluster, "sequence", Scale.POSITIVE)
    exponent = estimator.smooth(fit(lambda log_a, b: b), by_cluster, "sequence")
    if coefficient is None or exponent is None:
        return _unfitted("the summed log-ratio does not vary between responses")
    measured = SpreadFit(int(ends[0]), int(ends[-1]), coefficient, exponent)
    log_budget = None
    if exponent.low is not None and exponent.low > 0:
        log_variance = math.log(math.log(1 / ess))
        log_budget = estimator.smooth(fit(lambda log_a, b: (log_variance - log_a) / b), by_cluster, "sequence")
    if log_budget is None or log_budget.high is None or log_budget.high > LARGEST_LOG_BOUND:
        return replace(measured, unavailable={"budget_tokens": "the spread is not seen to grow with length"})
    if log_budget.value > math.log(FARTHEST_EXTRAPOLATION * ends[-1]):
        reason = f"it lies more than {FARTHEST_EXTRAPOLATION:,} times beyond the {ends[-1]:,} tokens measured"
        return replace(measured, unavailable={"budget_tokens": reason})
    return replace(measured, budget=mapped(log_budget, math.exp))


def _unfitted(reason: str) -> SpreadFit:
    return SpreadFit(unavailable=dict.fromkeys(("spread_coefficient", "spread_exponent", "budget_tokens"), reason))


def _lengths_to_fit(grid: PositionGrid) -> Mask:
    """Ends that enough sequences reach, over the last factor of 64: the growth near the lengths that matter."""
    num_reached = grid.reached.sum(axis=0)
    enough = num_reached >= max(FEWEST_SEQUENCES, FEWEST_SHARE * grid.sequences.num_sequences)
    longest = int(grid.ends[enough].max(initial=0))
    return np.asarray(enough & (grid.ends * RANGE_OF_FIT >= longest) & (grid.ends > 1))


def _power_law(columns: Floats, log_lengths: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """log a and b [G] from counts, sums and sums of squares [3 K, G] at K lengths."""
    count, total, squares = columns.reshape(3, log_lengths.size, -1)
    log_variance = np.log((squares - total**2 / count) / (count - 1))
    share = weights / weights.sum()
    center = share @ log_lengths
    exponent = (share * (log_lengths - center)) @ log_variance / (share @ (log_lengths - center) ** 2)
    return share @ log_variance - exponent * center, exponent
