import numpy as np
import pytest

from mismatch_probe.stats.sequences import MISSING_LOG_PROB, Repeat, Sequences, TokenPair, is_missing, is_usable


def test_sums_follow_the_sequences_and_then_their_clusters():
    sequences = Sequences.of_lengths([2, 1, 3], clusters=[7, 3, 7])
    per_sequence = sequences.sum_by_sequence(np.arange(6.0))
    assert per_sequence.tolist() == [1, 2, 12]
    assert sequences.sum_by_cluster(per_sequence).tolist() == [2, 13]
    assert sequences.positions.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_mask_is_counted_not_overflowed():
    sequences = Sequences.of_lengths([1000])
    assert sequences.sum_by_sequence(np.ones(1000, dtype=bool)).tolist() == [1000]


def test_a_sequence_without_tokens_is_refused():
    with pytest.raises(ValueError, match="without a token"):
        Sequences.of_lengths([3, 0, 2])


def test_clusters_of_another_number_are_refused():
    with pytest.raises(ValueError, match="2 clusters"):
        Sequences.of_lengths([3, 1, 2], clusters=[0, 1])


@pytest.mark.parametrize("leg", ["log_pi", "log_mu", "log_ref", "entropy_pi", "log_mu_prefill", "log_ref_rounded_mu"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, MISSING_LOG_PROB])
def test_a_non_finite_value_in_any_leg_is_refused_and_named(leg: str, poison: float):
    legs = {name: np.full(3, -1.0) for name in ("log_pi", "log_mu", leg)}
    legs[leg][1] = poison
    with pytest.raises(ValueError, match=leg):
        TokenPair(Sequences.of_lengths([3]), **legs)


def test_a_non_finite_value_in_a_repeated_leg_is_refused():
    with pytest.raises(ValueError, match="2 finite log-probs"):
        Repeat(Sequences.of_lengths([2]), np.zeros(2), np.array([0.0, np.nan]))


def test_what_is_missing_is_no_value_and_infinity_is_another_fault():
    values = np.float32([-0.5, -9900.0, MISSING_LOG_PROB, -2e4, np.nan, -np.inf])
    assert is_missing(values).tolist() == [False, False, True, True, True, False]
    assert is_usable(values).tolist() == [True, True, False, False, False, False]


def test_a_leg_of_another_length_is_refused():
    with pytest.raises(ValueError, match="log_pi has shape"):
        TokenPair(Sequences.of_lengths([3]), np.zeros(2), np.zeros(3))


def test_differences_of_float32_legs_are_taken_in_float64():
    log_pi, log_mu = np.array([-0.1], np.float32), np.array([-0.3], np.float32)
    pair = TokenPair(Sequences.of_lengths([1]), log_pi, log_mu)
    assert pair.diff.dtype == np.float64
    assert pair.diff[0] == float(log_pi[0]) - float(log_mu[0])


def test_positive_log_probs_are_refused_beyond_rounding():
    pair = TokenPair(Sequences.of_lengths([1]), np.array([0.005]), np.zeros(1))
    assert pair.prob_pi[0] > 1
    with pytest.raises(ValueError, match="log_mu reaches 2"):
        TokenPair(Sequences.of_lengths([1]), np.zeros(1), np.array([2.0]))
