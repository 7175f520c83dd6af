"""What the step's responses would earn had pi sampled them, against weights that are known."""

import math

import numpy as np
import pytest

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.parts import response_metrics
from mismatch_probe.train.rollouts import Rollout


def rollout(number: int, reward: float) -> Rollout:
    sequence = TokenSequence(f"step/{number}", [1, 2], [3, 4])
    return Rollout(sequence, np.array([-1.0, -1.0]), f"problem-{number}", reward, truncated=False, text="")


def metrics_of(diff: float, *rewards: float) -> dict[str, float]:
    """Of responses of two tokens, the first of which pi finds likelier by `diff` in all."""
    log_pi = np.full(2 * len(rewards), -1.0)
    log_pi[0] += diff
    return response_metrics([rollout(*each) for each in enumerate(rewards)], log_pi, np.ones(2 * len(rewards)))


def test_a_response_that_pi_finds_three_times_likelier_counts_three_times() -> None:
    metrics = metrics_of(math.log(3), 1.0, 0.0)
    assert metrics["reward/mean"] == metrics["reward/solved_share"] == 0.5
    assert metrics["reward/mean_pi"] == pytest.approx(0.75)
    assert metrics["reward/solved_share_pi"] == pytest.approx(0.75)


def test_equal_sides_have_no_gap() -> None:
    metrics = metrics_of(0.0, 1.0, 0.0, 0.5)
    assert metrics["reward/mean_pi"] == pytest.approx(metrics["reward/mean"])
    assert metrics["reward/solved_share"] == metrics["reward/solved_share_pi"] == pytest.approx(1 / 3)


def test_a_reward_that_is_no_number_is_left_out_of_both() -> None:
    metrics = metrics_of(math.log(3), math.nan, 1.0, 0.0)
    assert metrics["reward/mean"] == metrics["reward/mean_pi"] == 0.5


def test_without_any_number_there_is_no_reward_under_pi() -> None:
    assert math.isnan(metrics_of(0.0, math.nan)["reward/mean_pi"])
