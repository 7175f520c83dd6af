"""Do two sides of a mixture of experts choose the same experts for a token, and weigh them the same?

Ids and weights are [..., K]: K experts for each of any number of tokens and layers.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


def other_experts(first: Ids, second: Ids) -> NDArray[np.bool_]:
    """Whether the second side takes another set of experts [...]; their order does not count."""
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


def _dense(ids: Ids, weights: Weights, num_experts: int) -> NDArray[np.float64]:
    dense = np.zeros((*ids.shape[:-1], num_experts))
    np.put_along_axis(dense, ids.astype(np.int64), weights.astype(np.float64), axis=-1)
    return dense
