"""The standard error of a mean over values that come in clusters, such as the responses to one prompt."""

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints


def mean_error(values: Floats, clusters: Ints | None = None) -> float:
    """Standard error of the mean of `values` [N]; `clusters` [N] numbers each value's cluster, from 0.

    Values of one cluster may be alike; clusters are independent draws: sqrt(C / (C - 1) sum of squared cluster sums of
    the residuals) / N. Where none are given, each value is a draw of its own. NaN with fewer than two draws, or where a
    value is not finite.
    """
    residuals = values - values.mean()
    if clusters is not None:
        residuals = np.bincount(clusters, weights=residuals)
    draws = len(residuals)
    if draws < 2:
        return np.nan
    return float(np.sqrt(draws / (draws - 1) * (residuals**2).sum()) / len(values))
