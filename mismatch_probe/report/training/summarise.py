"""What came of a run, in one record that the page and `--json` share."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from mismatch_probe.records.training_run import GuardFirings, MetricCourse, Outcome, TrainingSummary
from mismatch_probe.report.training.course import Course, Firing
from mismatch_probe.stats.sequences import Floats

REWARD = "reward/mean"
MISMATCH = "mismatch/kl_k3"
OVERFLOW = "optim/overflow"
_STOPPED = "stopped: "
_WIDEST_WINDOW = 10
_WINDOWS = 5


def summarise_course(course: Course, report: str) -> TrainingSummary:
    """`report` is where the page is."""
    settings = course.manifest.settings
    outcome, diagnosis = _outcome(course.manifest.outcome)
    window = window_of(len(course.steps))
    best, best_step = _best(course, window)
    seconds = course.metric("time/step_seconds")
    tokens = course.metric("time/tokens_per_second") * seconds
    return TrainingSummary(
        tool_version=course.manifest.tool_version,
        model=course.manifest.model.name,
        task=settings.task.source,
        objective=settings.objective.name,
        train_dtype=settings.train_dtype,
        infer_dtype=settings.infer_dtype,
        seed=settings.seed,
        outcome=outcome,
        diagnosis=diagnosis,
        steps=int(course.steps[-1]) if len(course.steps) else 0,
        steps_asked=settings.steps,
        window=window,
        best_reward=best,
        best_reward_step=best_step,
        skipped_updates=int((course.metric(OVERFLOW) > 0).sum()),
        seconds=float(np.nansum(seconds)),
        num_tokens=round(float(np.nansum(tokens))),
        num_events=len(course.firings),
        guards=_guards(course.firings),
        guards_off=course.manifest.guards_off,
        metrics={name: metric_course(course.steps, values, window) for name, values in course.metrics.items()},
        report=report,
    )


def window_of(num_steps: int) -> int:
    """Over how many steps the first and the last values are averaged: a fifth of the run, ten at the most."""
    return max(1, min(_WIDEST_WINDOW, num_steps // _WINDOWS))


def metric_course(steps: Floats, values: Floats, window: int) -> MetricCourse:
    """First, last, lowest and highest of values [steps]."""
    known = np.isfinite(values)
    lowest, highest = (
        (int(chosen(np.where(known, values, fill))) if known.any() else None)
        for chosen, fill in ((np.argmin, np.inf), (np.argmax, -np.inf))
    )
    return MetricCourse(
        first=finite_mean(values[:window]),
        last=finite_mean(values[-window:]),
        lowest=None if lowest is None else float(values[lowest]),
        lowest_step=None if lowest is None else int(steps[lowest]),
        highest=None if highest is None else float(values[highest]),
        highest_step=None if highest is None else int(steps[highest]),
        nonfinite_steps=int((~known).sum()),
    )


def finite_mean(values: Floats) -> float | None:
    """The mean of the finite ones; None where there is none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _best(course: Course, window: int) -> tuple[float | None, int | None]:
    """The highest mean reward of `window` steps in a row, all of them finite, and the last of these steps."""
    rewards = course.metric(REWARD)
    if len(rewards) < window:
        return None, None
    means = np.lib.stride_tricks.sliding_window_view(rewards, window).mean(axis=1)
    if not np.isfinite(means).any():
        return None, None
    best = int(np.argmax(np.where(np.isfinite(means), means, -np.inf)))
    return float(means[best]), int(course.steps[best + window - 1])


def _outcome(recorded: str) -> tuple[Outcome, str | None]:
    if recorded.startswith(_STOPPED):
        return "stopped", recorded.removeprefix(_STOPPED)
    return ("finished" if recorded == "finished" else "unfinished"), None


def _guards(firings: Sequence[Firing]) -> list[GuardFirings]:
    """One entry a guard, in the order in which they first fired."""
    by_guard = groupby(sorted(firings, key=lambda firing: firing.guard), key=lambda firing: firing.guard)
    guards = []
    for guard, group in by_guard:
        fired = list(group)
        guards.append(
            GuardFirings(
                guard=guard,
                metric=fired[0].metric,
                firings=len(fired),
                first_step=fired[0].step,
                last_step=fired[-1].step,
                actions=list(dict.fromkeys(action for firing in fired for action in firing.actions)),
                sentence=fired[0].sentence,
            )
        )
    return sorted(guards, key=lambda fired_guard: fired_guard.first_step)
