"""Curves over steps lose no step and no spike, however long the run."""

import numpy as np
import pytest

from mismatch_probe.report.figures.over_steps import MOST_POINTS, neighbours, smooth


def test_a_short_run_is_drawn_step_by_step() -> None:
    steps, values = np.arange(1.0, 21), np.arange(20.0)
    drawn = smooth(steps, values)
    assert (drawn.mean == values).all()
    assert (drawn.low == values).all()
    assert (drawn.high == values).all()


def test_a_longer_run_is_drawn_as_means_of_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=60)
    drawn = smooth(np.arange(1.0, 61), values)
    assert neighbours(60) == 3
    assert drawn.mean[10] == pytest.approx(values[9:12].mean())
    assert drawn.mean[0] == pytest.approx(values[:2].mean())
    assert (drawn.low <= drawn.mean).all()
    assert (drawn.mean <= drawn.high).all()


@pytest.mark.parametrize("num_steps", [5, 60, MOST_POINTS, MOST_POINTS + 1, 1_000, 20_000])
def test_one_spike_is_seen_wherever_it_is(num_steps: int) -> None:
    for place in (0, num_steps // 3, num_steps - 1):
        values = np.zeros(num_steps)
        values[place] = 7.0
        assert smooth(np.arange(1.0, num_steps + 1), values).high.max() == 7.0


def test_a_very_long_run_has_few_points() -> None:
    assert len(smooth(np.arange(100_000.0), np.zeros(100_000)).steps) < 2_000


def test_steps_that_are_not_finite_are_in_no_mean_and_alone_leave_a_gap() -> None:
    values = np.ones(60)
    values[30] = np.inf
    values[40:45] = np.nan
    drawn = smooth(np.arange(60.0), values)
    assert drawn.mean[30] == 1
    assert np.isnan(drawn.mean[42])
    assert np.isfinite(drawn.mean[46])
