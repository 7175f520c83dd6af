"""What a batch can hardly be is warned of, and sound batches are not."""

import warnings
from typing import Any

import numpy as np
import pytest

from mismatch_probe.guards.batch import Batch
from tests.guards.steps import batch

RNG = np.random.default_rng(0)


def drawn(rows: int = 16, tokens: int = 60) -> tuple[np.ndarray, np.ndarray]:
    log_mu = -RNG.exponential(1.0, (rows, tokens))
    return np.minimum(log_mu + 0.01 * RNG.standard_normal(log_mu.shape), 0.0), log_mu


def measured(log_pi: np.ndarray, log_mu: np.ndarray, mask: Any = True, **others: Any) -> None:
    Batch(log_pi, log_mu, mask, **others).measure()


@pytest.mark.parametrize("fill", [0.0, np.nan, -9999.0])
@pytest.mark.parametrize("place", [slice(None, 12), slice(-12, None)], ids=["left", "right"])
def test_padding_that_counts_is_warned_of(place: slice, fill: float) -> None:
    log_pi, log_mu = drawn()
    for side in (log_pi, log_mu):
        side[:5, place] = fill
    with pytest.warns(UserWarning, match="padding counts as tokens"):
        measured(log_pi, log_mu)
    mask = np.ones(log_mu.shape)
    mask[:5, place] = 0
    measured(log_pi, log_mu, mask)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_tokens_that_both_sides_are_sure_of_are_no_padding(share: float) -> None:
    log_pi, log_mu = drawn(64, 100)
    sure = RNG.random(log_mu.shape) < share
    log_pi[sure] = log_mu[sure] = 0.0
    measured(log_pi, log_mu)


def test_rows_that_stand_there_twice_are_warned_of_unless_they_are_likely() -> None:
    log_pi, log_mu = drawn()
    with pytest.warns(UserWarning, match="rows were copied"):
        measured(np.concatenate([log_pi, log_pi[:1]]), np.concatenate([log_mu, log_mu[:1]]))
    measured(np.tile(log_pi[:, :3], (2, 1)), np.tile(log_mu[:, :3], (2, 1)))


def test_a_mask_that_leaves_nothing_of_many_responses_is_warned_of() -> None:
    log_pi, log_mu = drawn()
    mask = np.ones(log_mu.shape)
    mask[:7] = 0
    measured(log_pi, log_mu, mask)
    mask[:8] = 0
    with pytest.warns(UserWarning, match="half of the responses or more have no token that counts"):
        measured(log_pi, log_mu, mask)


def test_an_entropy_that_no_vocabulary_has_is_warned_of() -> None:
    log_pi, log_mu = drawn()
    entropy = np.ones(log_mu.shape)
    entropy[3, 3] = 13.8
    measured(log_pi, log_mu, entropy=entropy)
    entropy[3, 3] = 14.0
    with pytest.warns(UserWarning, match=r"entropy is above 13.9 nats, the most that a vocabulary of 1,048,576 tokens"):
        measured(log_pi, log_mu, entropy=entropy)


@pytest.mark.slow
def test_sound_batches_are_warned_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            batch(step).measure()
            batch(step, temperature=0.3).measure()
