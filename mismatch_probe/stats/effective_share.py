"""What weights leave of a sample, and the share that their logs say they leave where the sample misses the largest."""

import math
from dataclasses import replace

import numpy as np

from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats

LOG_BOUND = 20.0


def relative_excess(log_ratios: Floats) -> Floats:
    """w / c - 1 for w = e^d, where only the weights' shares matter: c is 1, exact for tiny d, and the largest weight
    where one lies beyond e^20, so that no sum overflows and no weight is bounded.
    """
    beyond = np.abs(log_ratios).max(initial=0.0) > LOG_BOUND
    return np.asarray(np.expm1(log_ratios - log_ratios.max() if beyond else log_ratios))


def squared_excess(log_ratios: Floats) -> Floats:
    """(w - 1)^2 for w = e^d."""
    return np.asarray(np.expm1(log_ratios) ** 2)


def with_hidden_tail(share: Estimate, spread: Estimate, num_clusters: int) -> Estimate:
    """An effective share whose interval also holds those of log-normal weights, exp(-spread) [Kong, Liu and Wong 1994,
    JASA 89:278].

    spread: variance of the log-weights. A few weights decide the share, and a sample that holds none of the largest
    shows a share too large and too sure; the logs of all of them show that there must be such. A variance about the
    sample's own mean is too small by up to 1 in the number of clusters.
    """
    if share.low is None or share.high is None:
        return share
    if spread.low is None or spread.high is None:
        return replace(share, low=0.0, high=1.0)
    low = math.exp(-spread.high * num_clusters / (num_clusters - 1))
    return replace(share, low=min(share.low, low), high=max(share.high, math.exp(-spread.low)))
