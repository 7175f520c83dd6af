import numpy as np
import pytest

from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.stats.subsamples import other_experts, routing_check, weight_distance

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


def test_another_number_of_experts_is_another_set():
    assert other_experts(IDS, IDS[:, :1]).all()


def test_a_deviation_that_lies_where_experts_moved_is_told_from_one_that_does_not():
    random = np.random.default_rng(0)
    num_tokens = 400
    sequences = Sequences.of_lengths([40] * 10)
    moved = random.random(num_tokens) < 0.05
    others = np.stack([np.zeros(num_tokens, dtype=bool), moved])
    distances = np.where(others, 0.4, 1e-3 * random.random((2, num_tokens)))
    noise = random.normal(0, 1e-3, num_tokens)
    where_moved = routing_check(sequences, (0, 3), others, distances, noise + 0.1 * moved)
    anywhere = routing_check(sequences, (0, 3), others, distances, noise)
    assert [layer.layer for layer in where_moved.layers] == [0, 3]
    assert where_moved.layers[0].other_experts.value == 0
    assert where_moved.layers[1].other_experts.value == where_moved.in_some_layer.value == moved.mean()
    assert where_moved.other_experts.value == moved.mean() / 2
    assert where_moved.weight_distance.value == pytest.approx(distances.mean())
    assert where_moved.squares_where_moved is not None
    assert where_moved.squares_where_moved.value > 0.99
    assert anywhere.squares_where_moved is not None
    assert anywhere.squares_where_moved.value == pytest.approx(0.1, abs=0.05)


def test_where_nothing_deviates_there_is_no_share_of_it():
    zeros = np.zeros((1, 4))
    assert routing_check(Sequences.of_lengths([4]), (0,), zeros > 0, zeros, zeros[0]).squares_where_moved is None
