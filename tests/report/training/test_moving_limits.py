"""The moving limit that a page draws is what the guard itself held the step against."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.guards.book import GuardBook, of_canary
from mismatch_probe.guards.rules import recorded_guards
from mismatch_probe.report.figures.limits import MovingLimit, moving_in_reach
from mismatch_probe.report.training.course import Course, read_courses
from mismatch_probe.report.training.dynamics import moving_limits_on
from mismatch_probe.report.training.page import render_training, summarise_training
from tests.report.pages import drawings, traces
from tests.report.training.training_runs import TrainingSample, step_metrics, training_run

KL = "mismatch/kl_k3"
GROWTH = {"name": "kl-growth", "rule": "growth", "metric": KL, "ratio": 4.0, "reference": 6, "actions": ["warn"]}
MEDIAN = GROWTH | {"name": "kl-median", "window": 3}
DOWN = GROWTH | {"name": "reward-fall", "metric": "reward/mean", "direction": "down", "ratio": 1.05, "least": 0.2}
FLOOR = {"name": "kl-floor", "rule": "floor", "metric": KL, "times": 3.0, "actions": ["warn"]}
LIMIT = {"name": "kl-limit", "rule": "limit", "metric": KL, "above": 1.0, "actions": ["stop"]}
FALL = {step: {"reward/mean": 0.3} for step in (20, 21, 22)}


def course_of(folder: Path, *guards: dict[str, Any], **sampled: Any) -> tuple[Course, TrainingSample]:
    declared = tuple(guard.model_dump(mode="json") for guard in recorded_guards(guards, "here"))
    sample = TrainingSample(steps=40, guards=declared, **sampled)
    [course] = read_courses([training_run(folder / "run", sample)])
    return course, sample


@pytest.mark.parametrize("guard", [GROWTH, MEDIAN, DOWN, FLOOR], ids=lambda guard: guard["name"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_limit_drawn_is_the_threshold_of_every_firing(tmp_path: Path, guard: dict[str, Any], seed: int) -> None:
    course, sample = course_of(tmp_path, guard, seed=seed, grows_at=15, changes=FALL)
    book, fired = GuardBook(recorded_guards([guard], "here")), {}
    for step in range(1, sample.steps + 1):
        metrics = step_metrics(step, sample)
        if step == 1:
            book.observe_canary(of_canary(metrics))
        fired |= {event.step: event.threshold for event in book.evaluate(step, metrics).events}
    [limit] = moving_limits_on(guard["metric"], course)
    drawn = dict(zip(limit.steps, limit.values, strict=True))
    assert len(fired) >= 2
    assert {step: drawn[step] for step in fired} == fired
    assert limit.is_upper is (guard is not DOWN)


def test_a_fixed_limit_does_not_move_and_a_guard_of_another_version_has_none(tmp_path: Path) -> None:
    course, _ = course_of(tmp_path, LIMIT, GROWTH)
    assert [limit.words for limit in moving_limits_on(KL, course)] == ["guard kl-growth: above this it asks to warn"]
    unknown = course.manifest.guards[1] | {"ratio": "four"}
    course.manifest.guards[1] = unknown
    assert list(moving_limits_on(KL, course)) == []


@pytest.mark.slow
def test_a_run_alone_shows_it_and_runs_beside_each_other_do_not(tmp_path: Path) -> None:
    course_of(tmp_path, GROWTH)
    page = page_of(tmp_path / "run")
    [line] = [trace for trace in traces(drawings(page)["plot-kl"]) if "guard kl-growth" in str(trace.get("hovertext"))]
    assert line["line"]["dash"] == "1px,3px"
    assert "what guards hold a step against" in page
    training_run(tmp_path / "other", TrainingSample(steps=40, seed=3))
    assert "what guards hold a step against" not in page_of(tmp_path / "run", tmp_path / "other")


def test_what_is_far_from_the_curve_does_not_squeeze_it() -> None:
    limit = MovingLimit([1, 2, 3], [5.0, 1e9, None], True, "")
    assert [near.values for near in moving_in_reach([limit], [1.0, 2.0], logarithmic=True)] == [[5.0, None, None]]
    assert moving_in_reach([limit._replace(values=[1e9, None, None])], [1.0, 2.0], logarithmic=True) == []


def page_of(*folders: Path) -> str:
    from mismatch_probe.records.training_run import TrainingDirectory

    directories = [TrainingDirectory(folder) for folder in folders]
    summaries = [summarise_training(directory) for directory in directories]
    return render_training(list(zip(read_courses(directories), summaries, strict=True)))
