import math

import numpy as np
import pytest

from mismatch_probe.stats.estimator import blame
from mismatch_probe.stats.sequences import Repeat, Sequences, TokenPair
from tests.stats.pairs import clustered_pair

SEQUENCES = Sequences.of_lengths(np.full(64, 100))


def errors(rms: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, rms, SEQUENCES.num_tokens)


LOG_REF = -1 - np.random.default_rng(0).random(SEQUENCES.num_tokens)


def test_independent_errors_add_in_squares():
    blamed = blame(TokenPair(SEQUENCES, LOG_REF + errors(0.03, 1), LOG_REF + errors(0.04, 2), LOG_REF))
    assert blamed.rms_error_pi is not None
    assert blamed.rms_error_mu is not None
    assert blamed.error_correlation is not None
    assert blamed.rms_error_pi.value == pytest.approx(0.03, rel=0.05)
    assert blamed.rms_error_mu.value == pytest.approx(0.04, rel=0.05)
    assert blamed.error_correlation.value == pytest.approx(0, abs=0.05)
    assert blamed.rms_if_independent == pytest.approx(math.hypot(0.03, 0.04), rel=0.05)
    assert blamed.rms_difference.value == pytest.approx(0.05, rel=0.05)
    assert blamed.share_pi is not None
    assert blamed.share_pi.value == pytest.approx(9 / 25, abs=0.03)


def test_shared_errors_cancel_in_the_difference_and_show_in_the_correlation():
    shared = errors(0.05, 1)
    blamed = blame(TokenPair(SEQUENCES, LOG_REF + shared, LOG_REF + shared + errors(0.001, 2), LOG_REF))
    assert blamed.error_correlation is not None
    assert blamed.rms_if_independent is not None
    assert blamed.error_correlation.value > 0.99
    assert blamed.rms_difference.value < 0.05 * blamed.rms_if_independent


def test_the_side_that_errs_is_named():
    blamed = blame(TokenPair(SEQUENCES, LOG_REF + errors(0.05, 1), LOG_REF + errors(0.001, 2), LOG_REF))
    assert blamed.share_pi is not None
    assert blamed.share_pi.low is not None
    assert blamed.share_pi.low > 0.99


def test_equal_legs_leave_nothing_to_blame_and_say_so():
    blamed = blame(TokenPair(SEQUENCES, LOG_REF, LOG_REF, LOG_REF))
    assert blamed.rms_difference.value == 0
    assert blamed.share_pi is None
    assert set(blamed.unavailable) == {"share_pi", "error_correlation"}


def test_without_a_reference_only_the_difference_is_known():
    blamed = blame(clustered_pair(16, seed=0))
    assert blamed.rms_error_pi is None
    assert blamed.rms_difference.value > 0
    assert {"rms_error_pi", "rms_error_mu", "error_correlation", "share_pi"} == set(blamed.unavailable)


def test_the_weight_cast_and_the_arithmetic_are_told_apart():
    cast, arithmetic = errors(0.03, 1), errors(0.002, 2)
    rounded = LOG_REF + cast
    blamed = blame(TokenPair(SEQUENCES, rounded + arithmetic, LOG_REF, LOG_REF, log_ref_rounded_pi=rounded))
    assert blamed.components["pi_weight_cast"].value == pytest.approx(0.03, rel=0.05)
    assert blamed.components["pi_arithmetic"].value == pytest.approx(0.002, rel=0.05)
    assert "mu_weight_cast" not in blamed.components


def test_decode_is_held_against_prefill():
    prefill = LOG_REF + errors(0.01, 1)
    blamed = blame(TokenPair(SEQUENCES, LOG_REF, prefill + errors(0.002, 2), LOG_REF, log_mu_prefill=prefill))
    assert blamed.components["mu_decode_vs_prefill"].value == pytest.approx(0.002, rel=0.05)
    assert blamed.components["mu_prefill"].value == pytest.approx(0.01, rel=0.05)


def test_a_repeated_leg_measures_its_own_sides_floor():
    log_pi, log_mu = LOG_REF + errors(0.01, 1), LOG_REF + errors(0.01, 2)
    some = Sequences.of_lengths(np.full(16, 100))
    repeats = {
        "pi_other_batch": Repeat(SEQUENCES, log_pi, log_pi + errors(1e-4, 3)),
        "mu_again": Repeat(some, log_mu[: some.num_tokens], log_mu[: some.num_tokens]),
    }
    blamed = blame(TokenPair(SEQUENCES, log_pi, log_mu, repeats=repeats))
    assert blamed.floors["pi_other_batch"].value == pytest.approx(1e-4, rel=0.05)
    assert blamed.floors["mu_again"].value == 0
    assert blamed.floors["mu_again"].num_sequences == 16
