"""Whether a length budget is only known from above: what the sample cannot show of S may end it sooner."""

import math
from typing import Final

import numpy as np

from mismatch_probe.stats.effective_share import squared_excess
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import ROUNDING
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.tails import RARE_UP_TO, error_tail

_LEVEL: Final = 0.9
_SHARE_OF_LOSS: Final = 0.25


def tokens_are_open(pair: TokenPair, estimator: Estimator) -> bool:
    """Whether tokens too rare for the sample may lose as much as all that it holds: E (w - 1)^2 would double."""
    held = np.minimum(pair.abs_diff, RARE_UP_TO)
    tail = error_tail(held, lambda values: estimator.totals(values, "token"), RARE_UP_TO)
    return tail is not None and tail.rest(squared_excess, _LEVEL) > float(squared_excess(held).mean())


def shape_is_open(estimator: Estimator, sums: Floats, ess: float, times_beyond: float) -> bool:
    """Whether S [N] may be skewed so much at the budget that it takes a quarter off what is to be lost.

    times_beyond: the budget over the length that the sums are of. ln ESS is -Var(S) less its third cumulant, to that
    order; beyond the data the skewness grows with the length to the power 1.5 where a bias of each response makes it.
    """
    centred = sums - sums.mean()
    powers = [estimator.counts("sequence"), *(estimator.totals(centred**power, "sequence") for power in (1, 2, 3))]
    skewness = estimator.smooth(_skewness, powers, "sequence")
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
