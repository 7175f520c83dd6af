"""The standard error of a mean reward over prompts, against how far such means really differ."""

import math

import numpy as np
import pytest

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.sums import Sums


def mean_error(rewards: np.ndarray, prompts: np.ndarray) -> float:
    return RewardTotals.of(rewards, prompts, None).metrics()["reward/mean_error"]


def test_rewards_of_prompts_of_their_own_have_the_usual_error() -> None:
    rewards = np.random.default_rng(0).normal(size=50)
    assert mean_error(rewards, np.arange(50)) == pytest.approx(rewards.std(ddof=1) / math.sqrt(50))


def test_copies_within_a_prompt_add_nothing() -> None:
    rewards = np.random.default_rng(1).normal(size=12)
    copied = mean_error(np.repeat(rewards, 4), np.repeat(np.arange(12), 4))
    assert copied == pytest.approx(mean_error(rewards, np.arange(12)))


@pytest.mark.slow
def test_it_is_how_far_the_means_of_many_steps_differ() -> None:
    random = np.random.default_rng(2)
    prompts = np.repeat(np.arange(16), 4)
    rewards = (random.random((2000, 16, 4)) < random.random((2000, 16, 1))).reshape(2000, 64).astype(np.float64)
    error = math.sqrt(np.mean([mean_error(step, prompts) ** 2 for step in rewards]))
    assert error == pytest.approx(rewards.mean(axis=1).std(), rel=0.05)


def test_one_prompt_has_no_error_that_is_known() -> None:
    assert math.isnan(mean_error(np.arange(4.0), np.zeros(4, dtype=int)))


def test_equal_rewards_have_a_spread_and_an_error_of_exactly_0() -> None:
    metrics = RewardTotals.of(np.full(12, 0.1), np.repeat(np.arange(3), 4), None).metrics()
    assert (metrics["reward/std"], metrics["reward/mean_error"], metrics["reward/flat_groups_share"]) == (0.0, 0.0, 1.0)


def test_parts_add_up_to_the_whole() -> None:
    rewards, prompts = np.random.default_rng(3).normal(size=40), np.repeat(np.arange(10), 4)
    parts = RewardTotals.of(rewards[:12], prompts[:12], None) + RewardTotals.of(rewards[12:], prompts[12:] - 3, None)
    assert parts.metrics() == pytest.approx(RewardTotals.of(rewards, prompts, None).metrics())


def test_the_range_of_whole_responses_follows_from_the_totals_alone() -> None:
    """However they come into the sums of a step."""
    rewards, cut = np.array([1.0, 0.0, 0.0, np.nan]), np.array([True, False, False, False])
    for flags, expected in ((None, 1.0), (cut, 0.0)):
        totals = RewardTotals.of(rewards, None, flags)
        assert totals.metrics()["reward/whole_range"] == expected
        assert Sums(rewards=totals).metrics()["reward/whole_range"] == expected
        of_rank = Batch(np.full((4, 2), -1.0), np.full((4, 2), -1.1), True, rewards=totals).measure()
        assert of_rank.metrics()["reward/whole_range"] == expected
