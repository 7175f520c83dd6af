"""Zeros that stand for nothing are told from those of certain tokens by where they stand."""

import numpy as np
import pytest

from mismatch_probe.explain.run import missing
from mismatch_probe.records.sequences import FloatArray

NUM_TOKENS = 5000
UNIT = 1e-3


@pytest.fixture(params=["sure", "unsure"])
def predicted(request: pytest.FixtureRequest) -> FloatArray:
    """Of a very sure model nine tenths of the tokens are nearly certain, and hardly any is below -1."""
    random = np.random.default_rng(1)
    unsure: FloatArray = -random.exponential(1.5, NUM_TOKENS)
    sure: FloatArray = np.where(random.random(NUM_TOKENS) < 0.1, -random.exponential(0.3, NUM_TOKENS), -1e-5)
    return sure if request.param == "sure" else unsure


def test_zeros_anywhere_are_missing(predicted: FloatArray) -> None:
    spoiled = np.random.default_rng(0).random(NUM_TOKENS) < 0.04
    column = np.where(spoiled, 0.0, predicted)
    assert np.array_equal(_missing(column, predicted), spoiled & (predicted < -4 * UNIT))


def test_zeros_beside_a_temperature_are_missing(predicted: FloatArray) -> None:
    spoiled = np.random.default_rng(0).random(NUM_TOKENS) < 0.04
    column = np.where(spoiled, 0.0, predicted * 1.4)
    assert np.array_equal(_missing(column, predicted), spoiled & (predicted < -4 * UNIT))


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_zeros_of_tokens_that_are_alone_in_a_nucleus_are_log_probs(predicted: FloatArray, top_p: float) -> None:
    alone = predicted > np.log(top_p)
    assert not _missing(np.where(alone, 0.0, predicted + 0.01), predicted).any()


def test_zeros_of_a_coarse_log_softmax_are_log_probs(predicted: FloatArray) -> None:
    assert not _missing(np.round(predicted * 8) / 8, predicted).any()


def test_zeros_of_another_response_are_log_probs(predicted: FloatArray) -> None:
    """They stand anywhere, and so do the others."""
    column = np.random.default_rng(2).permutation(np.round(predicted * 8) / 8)
    assert not _missing(column, predicted).any()


def test_a_column_of_zeros_is_missing(predicted: FloatArray) -> None:
    column = np.zeros(NUM_TOKENS)
    assert np.array_equal(_missing(column, predicted), predicted < -4 * UNIT)


def test_a_few_responses_of_zeros_among_zeros_of_a_coarse_log_softmax_are_missing() -> None:
    predicted = -np.random.default_rng(3).exponential(0.5, NUM_TOKENS)
    column = np.round(predicted * 8) / 8
    column[100:200] = column[2000:2100] = 0.0
    found = _missing(column, predicted)
    filled = np.isin(np.arange(NUM_TOKENS), [*range(100, 200), *range(2000, 2100)])
    assert np.array_equal(found, filled & (predicted < -4 * UNIT))


def _missing(column: FloatArray, predicted: FloatArray) -> np.ndarray:
    """Of responses of 100 tokens."""
    rows = np.arange(NUM_TOKENS) // 100
    return missing(column, predicted, np.full(NUM_TOKENS, UNIT), np.ones(NUM_TOKENS, dtype=np.bool_), rows)
