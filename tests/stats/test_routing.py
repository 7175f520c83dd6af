import numpy as np

from mismatch_probe.stats.routing import other_experts, weight_distance

IDS = np.array([[0, 1], [2, 3], [1, 0]], dtype=np.int32)
WEIGHTS = np.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]], dtype=np.float32)


def test_the_order_of_experts_is_no_difference():
    assert not other_experts(IDS, IDS[:, ::-1]).any()
    np.testing.assert_array_equal(weight_distance(IDS, WEIGHTS, IDS[:, ::-1], WEIGHTS[:, ::-1]), np.zeros(3))


def test_another_expert_and_another_weight_are_told_apart_and_measured():
    other = IDS.copy()
    other[1] = [2, 0]
    np.testing.assert_array_equal(other_experts(IDS, other), [False, True, False])
    weights = WEIGHTS.copy()
    weights[0] = [0.5, 0.5]
    np.testing.assert_allclose(weight_distance(IDS, WEIGHTS, other, weights), [0.25, 0.5, 0.0])


def test_choices_without_an_expert_in_common_are_one_apart():
    np.testing.assert_allclose(weight_distance(IDS, WEIGHTS, IDS + 4, WEIGHTS), np.ones(3))


def test_layers_and_tokens_are_compared_at_once():
    ids, weights = np.stack([IDS, IDS]), np.stack([WEIGHTS, WEIGHTS])
    assert other_experts(ids, ids).shape == weight_distance(ids, weights, ids, weights).shape == (2, 3)
