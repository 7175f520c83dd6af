"""Do two sides of a mixture of experts choose the same experts for a token, and weigh them the same?

Ids and weights are [..., K]: K experts for each of any number of tokens and layers.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.results import Estimate, LayerRouting, RoutingCheck
from mismatch_probe.stats.sequences import Floats, Sequences

MOVED: Final = 0.1
"""Share of the tokens whose experts' weights are furthest apart that the squared deviation is counted in."""

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


def other_experts(first: Ids, second: Ids) -> NDArray[np.bool_]:
    """Whether the second side takes another set of experts [...]; their order does not count."""
    if first.shape != second.shape:
        return np.ones(first.shape[:-1], dtype=bool)
    differs: NDArray[np.bool_] = np.any(np.sort(first, axis=-1) != np.sort(second, axis=-1), axis=-1)
    return differs


def weight_distance(
    first_ids: Ids, first_weights: Weights, second_ids: Ids, second_weights: Weights
) -> NDArray[np.float64]:
    """Half the sum over experts of the absolute difference of their weights [...]; one not taken weighs nothing.

    Where weights sum to 1 it is the total variation between the two choices: 0 where both agree, 1 where they share no
    expert.
    """
    num_experts = 1 + int(max(first_ids.max(initial=0), second_ids.max(initial=0)))
    difference = _dense(first_ids, first_weights, num_experts) - _dense(second_ids, second_weights, num_experts)
    distance: NDArray[np.float64] = np.abs(difference).sum(axis=-1) / 2
    return distance


def routing_check(
    sequences: Sequences,
    layers: Sequence[int],
    others: NDArray[np.bool_],
    distances: NDArray[np.float64],
    diff: Floats,
    level: float = 0.95,
) -> RoutingCheck:
    """What two sides' choices have to do with d [T], from `other_experts` and `weight_distance` [L, T]."""
    estimator = Estimator(sequences, level)
    squares, mean_distances = diff**2, distances.mean(axis=0)
    moved = mean_distances > np.quantile(mean_distances, 1 - MOVED)
    totals = [estimator.totals(values, "token") for values in (squares * moved, squares)]
    counts = estimator.counts("token")
    return RoutingCheck(
        layers=[
            LayerRouting(layer, estimator.share(others[at], "token"), _mean(estimator, distances[at]))
            for at, layer in enumerate(layers)
        ],
        other_experts=estimator.share_of_totals(
            estimator.totals(others.sum(axis=0), "token"), counts * len(layers), "token"
        ),
        in_some_layer=estimator.share(np.asarray(others.any(axis=0)), "token"),
        weight_distance=_mean(estimator, mean_distances),
        squares_where_moved=estimator.smooth(ratio, totals, "token", Scale.SHARE) if squares.any() else None,
    )


def _mean(estimator: Estimator, distances: NDArray[np.float64]) -> Estimate:
    estimate = estimator.mean(distances, "token", Scale.POSITIVE)
    assert estimate is not None, "distances lie between 0 and the sum of weights"
    return estimate


def _dense(ids: Ids, weights: Weights, num_experts: int) -> NDArray[np.float64]:
    dense = np.zeros((*ids.shape[:-1], num_experts))
    np.put_along_axis(dense, ids.astype(np.int64), weights.astype(np.float64), axis=-1)
    return dense
