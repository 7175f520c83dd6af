"""Curves over steps lose no step and no spike, however long the run."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.report.figures.over_steps import MOST_POINTS, AxisScale, Curve, draw, neighbours, smooth
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.training.course import read_courses
from mismatch_probe.report.training.dynamics import dynamics
from mismatch_probe.report.view import Figure, Heading
from tests.report.training.training_runs import TrainingSample, training_run


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


@pytest.mark.parametrize(
    ("value", "scale", "is_short"), [(5e4, "linear", True), (5.0, "linear", False), (5e4, "log", False)]
)
def test_thousands_on_a_linear_axis_are_written_as_such(value: float, scale: AxisScale, is_short: bool) -> None:
    curve = Curve("run", np.arange(1.0, 9), np.linspace(value / 2, value, 8), PairStyle("bf16", (), "o"))
    panel = draw(Heading("a", "a", "a", "a"), [curve], [], "value", scale, 8, 200)
    assert (panel.specification["layout"]["yaxis"].get("exponentformat") == "SI") == is_short


@pytest.mark.parametrize(("rate", "is_logarithmic"), [(1e-6, True), (5e-5, False)])
def test_a_rate_that_guards_changed_by_much_has_a_logarithmic_axis(
    tmp_path: Path, rate: float, is_logarithmic: bool
) -> None:
    changes = {step: {"optim/learning_rate": rate} for step in range(30, 61)}
    (course,) = read_courses([training_run(tmp_path / "run", TrainingSample(changes=changes))])
    figures = [block for section in dynamics([course]) for block in section.blocks if isinstance(block, Figure)]
    (panel,) = [panel for figure in figures for panel in figure.panels if panel.heading.title == "Learning rate"]
    assert panel.is_logarithmic == is_logarithmic
