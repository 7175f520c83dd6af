"""The chance that values at some tokens are as large, had each response been turned round."""

import numpy as np
import pytest

from mismatch_probe.stats.bins import less_mean_of_row, log_chance_of_turns
from mismatch_probe.stats.sequences import Floats, Ints, Mask

ROWS = np.repeat(np.arange(8), 60)
IS_THERE = (np.arange(480) % 60 + 7 * ROWS) % 16 == 3


def values_of(seed: int) -> Floats:
    return less_mean_of_row(np.random.default_rng(seed).exponential(1.0, 480), ROWS)


def after_turns(values: Floats, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    return np.concatenate([np.roll(row, random.integers(60)) for row in values.reshape(8, 60)])


def as_often(values: Floats, is_there: Mask) -> float:
    total = values[is_there].sum()
    return float(np.mean([after_turns(values, seed)[is_there].sum() >= total for seed in range(4000)]))


@pytest.mark.parametrize("nats", [0.4, 0.5, 0.6])
def test_it_is_how_often_turned_values_are_as_large(nats: float) -> None:
    values = less_mean_of_row(values_of(0) + nats * IS_THERE, ROWS)
    exact = as_often(values, IS_THERE)
    assert 0.001 < exact < 0.3
    assert np.exp(log_chance_of_turns(values, IS_THERE, ROWS, ROWS)) == pytest.approx(exact, rel=0.4)


def test_values_without_cause_reach_a_chance_as_often_as_it_says() -> None:
    chances = np.array([log_chance_of_turns(values_of(seed), IS_THERE, ROWS, ROWS) for seed in range(400)])
    for nats in (2, 3, 4):
        assert 0.3 < (chances < -nats).mean() / np.exp(-nats) < 1.7


def test_copies_count_once_where_they_are_turned_together() -> None:
    values = less_mean_of_row(values_of(1) + 1.5 * IS_THERE, ROWS)
    first: Ints = ROWS[ROWS < 4]
    own, there = values[: first.size], IS_THERE[: first.size]
    once = log_chance_of_turns(own, there, first, first)
    rows, units = np.concatenate([first, first + 4]), np.concatenate([first, first])
    twice = np.concatenate([own, own]), np.concatenate([there, there])
    assert log_chance_of_turns(*twice, rows, units) == pytest.approx(once, abs=0.3)
    assert log_chance_of_turns(*twice, rows, rows) < once - 5


def test_lines_that_all_responses_share_are_turned_together() -> None:
    lines = less_mean_of_row(np.where(np.arange(480) % 60 % 12 == 3, 3.0, 0.0), ROWS)
    is_there = np.arange(480) % 60 % 12 == 3
    assert log_chance_of_turns(lines, is_there, ROWS, np.zeros_like(ROWS)) > np.log(1 / 13)
    assert log_chance_of_turns(lines, is_there, ROWS, ROWS) < 6 * np.log(1 / 12)
