"""What came of a run: means over the ends, extremes with their steps, and values that are not finite counted."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.report.answers.train import training_answer
from mismatch_probe.report.training.headline import metric_course, window_of
from mismatch_probe.report.training.page import read_runs, summarise_training
from tests.report.training.training_runs import TrainingSample, firing, training_run


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (1, 1), (9, 1), (10, 2), (49, 9), (50, 10), (5000, 10)])
def test_ends_are_averaged_over_a_fifth_of_the_run_and_ten_steps_at_the_most(steps: int, window: int) -> None:
    assert window_of(steps) == window


def test_a_course_has_its_ends_and_extremes_with_their_steps() -> None:
    course = metric_course(np.arange(11.0, 17), np.array([1.0, 3, 9, 2, 4, 6]), 2)
    assert (course.first, course.last) == (2, 5)
    assert (course.lowest, course.lowest_step, course.highest, course.highest_step) == (1, 11, 9, 13)


def test_values_that_are_not_finite_are_counted_and_in_no_mean() -> None:
    course = metric_course(np.arange(4.0), np.array([1.0, np.inf, np.nan, 3.0]), 2)
    assert (course.first, course.last, course.highest, course.nonfinite_steps) == (1, 3, 3, 2)


def test_a_metric_that_never_was_a_number_has_no_mean() -> None:
    course = metric_course(np.arange(3.0), np.full(3, np.nan), 1)
    assert (course.first, course.last, course.lowest, course.highest, course.nonfinite_steps) == (None,) * 4 + (3,)


def test_the_best_reward_is_that_of_steps_in_a_row_and_not_a_lucky_one(tmp_path: Path) -> None:
    rewards = [0.1] * 4 + [0.95] + [0.1] * 5 + [0.5] * 5 + [0.2] * 5
    sample = TrainingSample(
        steps=20, changes={step + 1: {"reward/mean": reward} for step, reward in enumerate(rewards)}
    )
    summary = summarise_training(training_run(tmp_path / "run", sample))
    assert summary.window == 4
    assert summary.best_reward == pytest.approx(0.5)
    assert summary.best_reward_step == 14


def test_guards_are_summed_up_in_the_order_in_which_they_first_fired(tmp_path: Path) -> None:
    fired = (
        firing(5, ["warn"], guard="zeta"),
        firing(7, ["skip_update"], guard="alpha"),
        firing(9, ["rollback"], guard="zeta"),
    )
    summary = summarise_training(training_run(tmp_path / "run", TrainingSample(firings=fired)))
    assert [(guard.guard, guard.firings, guard.first_step, guard.last_step) for guard in summary.guards] == [
        ("zeta", 2, 5, 9),
        ("alpha", 1, 7, 7),
    ]
    assert summary.guards[0].actions == ["warn", "rollback"]
    assert summary.num_events == 3


def test_a_stop_carries_its_diagnosis_and_a_finish_none(tmp_path: Path) -> None:
    stopped = summarise_training(training_run(tmp_path / "a", TrainingSample(outcome="stopped: too far apart.")))
    finished = summarise_training(training_run(tmp_path / "b", TrainingSample()))
    assert (stopped.outcome, stopped.diagnosis) == ("stopped", "too far apart.")
    assert (finished.outcome, finished.diagnosis) == ("finished", None)


def test_tokens_and_seconds_add_up_over_the_steps(tmp_path: Path) -> None:
    summary = summarise_training(training_run(tmp_path / "run", TrainingSample(steps=12)))
    assert summary.num_tokens == 12 * 7_500
    assert 12 * 4 < summary.seconds < 12 * 9


def test_a_run_that_lost_its_reward_has_no_calm_mark_and_says_what_is_lost(tmp_path: Path) -> None:
    lost = {step: {"reward/mean": 0.01} for step in range(41, 61)}
    for name, changes, badge in (("lost", lost, "bug"), ("kept", {}, "clean")):
        directory = training_run(tmp_path / name, TrainingSample(changes=changes))
        answer = training_answer(read_runs([directory], directory.report_path))
        assert answer.badge.kind == badge
        assert ("that is lost again" in str(answer.headline)) is (name == "lost")
