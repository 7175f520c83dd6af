"""Importance weights pi / mu: their mean, how many leave a band, and how much of the sample they leave.

Means and corrections hold log-ratios within +-20, so that every sum exists; the bound lies far outside anything that a
usable correction lets through. An effective share needs none: only the weights' shares matter to it.
"""

from functools import partial

import numpy as np

from mismatch_probe.stats.effective_share import LOG_BOUND
from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.tails import RARE_UP_TO, ErrorTail, error_tail

BANDS = ((0.8, 1.25), (0.9, 1.1), (0.5, 2.0), (0.5, 5.0))


def bounded(log_ratios: Floats) -> Floats:
    return np.clip(log_ratios, -LOG_BOUND, LOG_BOUND)


def weight_excess(log_ratios: Floats) -> Floats:
    """w - 1 for w = e^d, exact for tiny d; d held within +-20."""
    return np.asarray(np.expm1(bounded(log_ratios)))


def tail_of(pair: TokenPair, estimator: Estimator) -> ErrorTail | None:
    """The tail of abs(d), up to the clip, or else to 5 nats or the largest seen, at most 20; None where all d are 0."""
    most = min(max(RARE_UP_TO, float(pair.abs_diff.max())), LOG_BOUND) if pair.clip is None else pair.clip
    return error_tail(pair.abs_diff, partial(estimator.totals, by="token"), most)


def importance_weights(pair: TokenPair, estimator: Estimator) -> Metrics:
    """Mean weight, perplexity ratio, effective sample share, and shares of rho outside bands.

    `is_ratio_mean_*` is 1 in expectation when both policies normalise over the same support. `ess_*` is Kish's
    effective sample size over n [Kish 1965; Liu 2001, Monte Carlo Strategies in Scientific Computing, section 2.5.3].
    The few largest e^S decide `ess_seq`, and a sample may hold none of them: its interval also holds that of log-normal
    weights, and its lower bound lies far below for that.
    `log_ppl_diff` and `ppl_ratio` are verl's: per sequence mean log mu - mean log pi, and the mean of its exponential.
    """

    def log_ppl_diff() -> Floats:
        return -pair.diff_sums / pair.sequences.lengths

    def outside(low: float, high: float) -> Estimate:
        return estimator.share((pair.diff < np.log(low)) | (pair.diff > np.log(high)), "token")

    return {
        "is_ratio_mean_token": lambda: estimator.mean(1 + weight_excess(pair.diff), "token"),
        "is_ratio_mean_seq": lambda: estimator.mean(1 + weight_excess(pair.diff_sums), "sequence", Scale.POSITIVE),
        "ess_token": lambda: estimator.effective_share(pair.diff, "token", tail_of(pair, estimator)),
        "ess_seq": lambda: estimator.effective_share(pair.diff_sums, "sequence"),
        "log_ppl_diff": lambda: estimator.mean(log_ppl_diff(), "sequence"),
        "ppl_ratio": lambda: estimator.mean(1 + weight_excess(log_ppl_diff()), "sequence"),
        **{f"outside_band_{low:g}_{high:g}": partial(outside, low, high) for low, high in BANDS},
    }
