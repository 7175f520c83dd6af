"""Log-probs that are none: absent, a floor that an engine writes, or 0 where no distribution gives certainty."""

from typing import Final

import numpy as np

from mismatch_probe.explain.tokens import Bools, Floats, Ints
from mismatch_probe.stats.zeros import SURELY_BELOW_ZERO, NearlySure, filled_with_zeros

FLOOR_NATS: Final = -1000.0
"""vLLM writes -9999; no token that was sampled has less than this."""
_UNCERTAIN_FLOORS: Final = 4.0
_FEWEST_COMPARED: Final = 20
_WRONG_AT_MOST: Final = 0.01


def missing(column: Floats, predicted: Floats, unit: Floats, counted: Bools, rows: Ints) -> Bools:
    """Which log-probs are missing [T]. unit: how far rounding moves the predicted ones [T], nats. rows: the response
    of each token [T], rising.
    """
    absent = ~np.isfinite(column) | (column <= FLOOR_NATS)
    uncertain = counted & ~absent & (predicted < -_UNCERTAIN_FLOORS * unit)
    zeros = uncertain & (column == 0)
    filled = zeros & _in_filled_responses(column, predicted, counted, rows)
    if 2 * filled.sum() <= zeros.sum():  # scores of other tokens have zeros anywhere in each response
        absent |= filled
        zeros, uncertain = zeros & ~filled, uncertain & ~filled
    if _mean_nothing(predicted[zeros], column[uncertain & ~zeros], predicted[uncertain & ~zeros]):
        absent |= zeros
    return np.asarray(counted & absent)


def _in_filled_responses(column: Floats, predicted: Floats, counted: Bools, rows: Ints) -> Bools:
    """Zeros that fill a response, or a stretch of one [T], by `stats.zeros`."""
    filled = np.zeros(column.shape, dtype=np.bool_)
    nearly_sure = NearlySure.of(column[counted], predicted[counted])
    for row in np.unique(rows[counted & (column == 0) & (predicted < SURELY_BELOW_ZERO)]):
        of_row = np.flatnonzero(counted & (rows == row))
        filled[of_row] = filled_with_zeros(column[of_row], predicted[of_row], nearly_sure)
    return filled


def _mean_nothing(at_zeros: Floats, others: Floats, at_others: Floats) -> bool:
    """Whether zeros stand at less likely tokens than the largest of the other log-probs do.

    A log-prob of 0 says that its token is the surest of all. Whatever computed the column, a temperature, a cut or
    other weights, such tokens are then at least as likely in the checkpoint's eyes as those that come next.
    """
    if not len(at_zeros) or not len(others):
        return bool(len(at_zeros))
    num_next = min(max(len(at_zeros), _FEWEST_COMPARED), max(1, len(others) // 2))
    comes_next = at_others[np.argpartition(-others, num_next - 1)[:num_next]]
    from scipy.stats import mannwhitneyu

    return bool(mannwhitneyu(at_zeros, comes_next, alternative="less").pvalue <= _WRONG_AT_MOST)
