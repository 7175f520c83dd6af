"""The standard error of a mean over clusters, against how far such means really differ."""

import math

import numpy as np
import pytest

from mismatch_probe.stats.mean_error import mean_error


def test_values_of_their_own_have_the_usual_error() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert mean_error(values) == pytest.approx(values.std(ddof=1) / math.sqrt(50))


def test_copies_within_a_cluster_add_nothing() -> None:
    values = np.random.default_rng(1).normal(size=12)
    assert mean_error(np.repeat(values, 4), np.repeat(np.arange(12), 4)) == pytest.approx(mean_error(values))


def test_it_is_how_far_the_means_of_many_steps_differ() -> None:
    random = np.random.default_rng(2)
    prompts = np.repeat(np.arange(16), 4)
    rewards = (random.random((2000, 16, 4)) < random.random((2000, 16, 1))).reshape(2000, 64).astype(np.float64)
    told = math.sqrt(np.mean([mean_error(step, prompts) ** 2 for step in rewards]))
    assert told == pytest.approx(rewards.mean(axis=1).std(), rel=0.05)


@pytest.mark.parametrize("clusters", [None, np.array([0])])
def test_one_draw_has_no_error_that_is_known(clusters: np.ndarray | None) -> None:
    assert math.isnan(mean_error(np.ones(1), clusters))
    assert math.isnan(mean_error(np.ones(4), np.zeros(4, dtype=int)))
