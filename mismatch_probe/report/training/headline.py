"""What came of a run, in one record that the page and `--json` share.

The first sentence on training runs: how they ended, by which guard and why, or what reward and mismatch did.

Where the time of a step goes, and what watching it costs.

The three things asked first of a training run: what it learnt, how far apart the sides are, what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from markupsafe import Markup

from mismatch_probe.notation import join_names, write_count, write_many, write_number, write_percent
from mismatch_probe.records.training_run import GuardFirings, MetricCourse, Outcome, TrainingSummary
from mismatch_probe.report.figures import over_steps as drawing
from mismatch_probe.report.names import visible
from mismatch_probe.report.training.course import Course, Firing, times
from mismatch_probe.report.view import Heading, Panel, Tile
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.verdict.headline import KL_LIMIT, against_limit

REWARD = "reward/mean"
MISMATCH = "mismatch/kl_k3"
OVERFLOW = "optim/overflow"
_STOPPED = "stopped: "
_WIDEST_WINDOW = 10
_WINDOWS = 5
_REST_OF_BEST = 0.5


def summarise_course(course: Course, report: str) -> TrainingSummary:
    """`report` is where the page is."""
    settings = course.manifest.settings
    outcome, diagnosis = _split_outcome(course.manifest.outcome)
    window = window_of(len(course.steps))
    best, best_step = _best_mean_reward(course, window)
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
        guards=_firings_by_guard(course.firings),
        guards_off=course.manifest.guards_off,
        metrics={name: metric_course(course.steps, values, window) for name, values in course.metrics.items()},
        report=report,
    )


def window_of(num_steps: int) -> int:
    """Over how many steps the first and the last values are averaged: a fifth of the run, ten at the most."""
    return max(1, min(_WIDEST_WINDOW, num_steps // _WINDOWS))


def metric_course(steps: Floats, values: Floats, window: int) -> MetricCourse:
    """First, last, lowest and highest of values [steps]."""
    finite = np.isfinite(values)
    lowest, highest = (
        (int(choose(np.where(finite, values, fill))) if finite.any() else None)
        for choose, fill in ((np.argmin, np.inf), (np.argmax, -np.inf))
    )
    return MetricCourse(
        first=finite_mean(values[:window]),
        last=finite_mean(values[-window:]),
        lowest=None if lowest is None else float(values[lowest]),
        lowest_step=None if lowest is None else int(steps[lowest]),
        highest=None if highest is None else float(values[highest]),
        highest_step=None if highest is None else int(steps[highest]),
        nonfinite_steps=int((~finite).sum()),
    )


def finite_mean(values: Floats) -> float | None:
    """The mean of the finite ones; None where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _best_mean_reward(course: Course, window: int) -> tuple[float | None, int | None]:
    """The highest mean reward of `window` steps in a row, all of them finite, and the last of these steps."""
    rewards = course.metric(REWARD)
    if len(rewards) < window:
        return None, None
    means = np.lib.stride_tricks.sliding_window_view(rewards, window).mean(axis=1)
    if not np.isfinite(means).any():
        return None, None
    best = int(np.argmax(np.where(np.isfinite(means), means, -np.inf)))
    return float(means[best]), int(course.steps[best + window - 1])


def _split_outcome(recorded_outcome: str) -> tuple[Outcome, str | None]:
    if recorded_outcome.startswith(_STOPPED):
        return "stopped", recorded_outcome.removeprefix(_STOPPED)
    return ("finished" if recorded_outcome == "finished" else "unfinished"), None


def _firings_by_guard(firings: Sequence[Firing]) -> list[GuardFirings]:
    """One entry a guard, in the order in which they first fired."""
    by_guard = groupby(sorted(firings, key=lambda firing: firing.guard), key=lambda firing: firing.guard)
    guards = []
    for guard, group in by_guard:
        of_guard = list(group)
        guards.append(
            GuardFirings(
                guard=guard,
                metric=of_guard[0].metric,
                firings=len(of_guard),
                first_step=of_guard[0].step,
                last_step=of_guard[-1].step,
                actions=list(dict.fromkeys(action for firing in of_guard for action in firing.actions)),
                sentence=of_guard[0].sentence,
            )
        )
    return sorted(guards, key=lambda fired_guard: fired_guard.first_step)


_ENDINGS = {
    "finished": ("finished", "finished"),
    "stopped": ("was stopped by a guard", "were stopped by a guard"),
    "unfinished": ("is unfinished", "are unfinished"),
}


def run_headline(summary: TrainingSummary) -> Markup:
    """How a run ended, and what reward and mismatch did, or which guard stopped it and why."""
    if not summary.steps:
        return Markup("No step is recorded yet.")
    steps_done, total = write_count(summary.steps), write_count(summary.steps_asked)
    if summary.outcome == "stopped":
        words = visible(_stoppers(summary)), steps_done, total, visible(why(summary))
        return Markup("{} stopped the run at step {} of {}. {}").format(*words)
    finish_words = f"Finished {write_many(summary.steps, 'step')}"
    outcome = finish_words if summary.outcome == "finished" else f"Unfinished after step {steps_done} of {total}"
    guards = f"guards fired {times(summary.num_events)}" if summary.num_events else "no guard fired"
    best = ""
    if reward_fell(summary):
        step = write_count(summary.best_reward_step or 0)
        best = (
            f" The best reward was {write_number(summary.best_reward or 0.0)}, up to step {step}: that is lost again."
        )
    return Markup("{}: {}; {}.{}").format(outcome, _course_sentence(summary), guards, best)


def reward_fell(summary: TrainingSummary) -> bool:
    """Whether the reward at the end is less than half of its best, over as many steps each."""
    if summary.best_reward is None or REWARD not in summary.metrics:
        return False
    last = summary.metrics[REWARD].last
    return last is not None and summary.best_reward > 0 and last < _REST_OF_BEST * summary.best_reward


def runs_headline(runs: Sequence[tuple[str, TrainingSummary]]) -> str:
    """How several runs, each with its name, ended."""
    endings = [summary.outcome for _, summary in runs]
    if set(endings) == {"finished"}:
        ends = [f"{_last_reward(summary)} ({label})" for label, summary in runs if REWARD in summary.metrics]
        return f"All {len(runs)} runs finished." + (f" Reward at the end {join_names(ends)}." if ends else "")
    counts = {ending: endings.count(ending) for ending in _ENDINGS if ending in endings}
    words = join_names([f"{number} {_ENDINGS[ending][number > 1]}" for ending, number in counts.items()])
    stop_words = "; ".join(
        f"{label} at step {write_count(summary.steps)} by {_stopping_guard_names(summary)}"
        for label, summary in runs
        if summary.outcome == "stopped"
    )
    return f"Of {len(runs)} runs {words}" + (f": {stop_words}." if stop_words else ".")


def stopping_guards(summary: TrainingSummary) -> list[str]:
    """Names of those that asked to stop at the last step; empty where no record names one."""
    return [guard.guard for guard in summary.guards if "stop" in guard.actions and guard.last_step >= summary.steps]


def why(summary: TrainingSummary) -> str:
    """The cause of a stop without its details: what the diagnosis says before its first colon or full stop."""
    cause = (summary.diagnosis or "").split(". ")[0].split(": ")[0].rstrip(".")
    return f"{cause}." if cause else ""


def _stoppers(summary: TrainingSummary) -> str:
    names = stopping_guards(summary)
    return "A guard" if not names else f"Guard{'s' if len(names) > 1 else ''} {join_names(names)}"


def _stopping_guard_names(summary: TrainingSummary) -> str:
    return join_names(stopping_guards(summary) or ["a guard"])


def _last_reward(summary: TrainingSummary) -> str:
    return write_number(summary.metrics[REWARD].last)


def _course_sentence(summary: TrainingSummary) -> Markup:
    words = [
        Markup("{} {}{}").format(name, _from_to(summary.metrics[metric]), unit)
        for name, metric, unit in (("reward", REWARD, ""), ("mismatch (k3)", MISMATCH, " nats a token"))
        if metric in summary.metrics
    ]
    return Markup(", ").join(words) if words else Markup("no step yet")


def _from_to(course: MetricCourse) -> Markup:
    """Two numbers that no line break may cut."""
    number = Markup('<span class="whole">{}</span>').format
    return Markup("from {} to {}").format(number(write_number(course.first)), number(write_number(course.last)))


_PREFIX, _SUFFIX = "time/", "_seconds"
_WHOLE = "step"
_WATCHING = {"probe": "the probe", "digest": "digests of weights", "measure": "metrics", "guards": "guards"}
_WORTH_A_BAR = 0.01


@dataclass(frozen=True)
class _Phases:
    """Mean seconds of a step by phase; `other` is what no phase claims."""

    course: Course
    seconds: dict[str, float]

    @classmethod
    def of(cls, course: Course) -> Self:
        names = [name for name in course.metrics if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
        means = {name[len(_PREFIX) : -len(_SUFFIX)]: finite_mean(course.metric(name)) or 0.0 for name in names}
        all_seconds = means.pop(_WHOLE, 0.0)
        return cls(course, {**means, "other": max(0.0, all_seconds - sum(means.values()))})

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())

    def share(self, *phases: str) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in phases) / self.all_seconds

    @property
    def watching(self) -> str:
        """What each part of it takes of a step."""
        return ", ".join(
            f"{words} {write_number(self.seconds[phase])} s, {100 * self.share(phase):.1f} %"
            for phase, words in _WATCHING.items()
            if phase in self.seconds
        )

    def __str__(self) -> str:
        return (
            f"{self.course.label}: {', '.join(f'{name} {write_number(time)} s' for name, time in self.seconds.items())}"
        )


def phases(courses: Sequence[Course]) -> list[Panel]:
    """One drawing of the runs that recorded times; phases that take next to nothing are named under it."""
    runs = [run for run in map(_Phases.of, courses) if run.all_seconds]
    if not runs:
        return []
    names = dict.fromkeys(name for run in runs for name in run.seconds)
    large = [name for name in names if any(run.share(name) >= _WORTH_A_BAR for run in runs)]
    small = [name for name in names if name not in large]
    sentences = ["Mean over all steps, and the share of a step."]
    if small:
        sentences.append(f"Below {write_percent(_WORTH_A_BAR)}: {', '.join(small)}.")
    costs = [f"{100 * run.share(*_WATCHING):.1f} % ({run.watching})" for run in runs]
    labels = [""] if len(runs) == 1 else [f" in {run.course.label}" for run in runs]
    sentences.append(f"Watching took {' and '.join(map(''.join, zip(costs, labels, strict=True)))}.")
    heading = Heading("plot-phases", "Where a step's time goes", "; ".join(map(str, runs)), " ".join(sentences))
    bars = [(run.course.style, {name: run.seconds.get(name, 0.0) for name in large}, run.all_seconds) for run in runs]
    return [drawing.draw_phases(heading, bars)]


def training_tiles(summary: TrainingSummary, num_guards: int) -> list[Tile]:
    """None before the first step. num_guards: that were on; 0 where no record says it."""
    if not summary.steps:
        return []
    tiles = []
    if (reward := summary.metrics.get(REWARD)) is not None:
        tiles.append(Tile("Reward at the end", write_number(reward.last), f"{write_number(reward.first)} at the start"))
    if (mismatch := summary.metrics.get(MISMATCH)) is not None:
        tiles.append(Tile("KL per token at the end", write_number(mismatch.last), _against_limit(mismatch)))
    return [*tiles, _guards_tile(summary, num_guards)]


def _against_limit(mismatch: MetricCourse) -> str:
    start_words = f"{write_number(mismatch.first)} at the start"
    if mismatch.last is None:
        return start_words
    return f"{start_words}; {against_limit(mismatch.last)} ({KL_LIMIT:g})"


def _guards_tile(summary: TrainingSummary, num_guards: int) -> Tile:
    if not summary.num_events:
        on = f"{write_many(num_guards, 'guard')} on; " if num_guards else ""
        return Tile("Guards", "silent", f"{on}none saw a reason to act")
    names = stopping_guards(summary) if summary.outcome == "stopped" else []
    if names:
        return Tile(
            "Stopped by", join_names(names), f"at step {summary.steps:,}; guards fired {times(summary.num_events)}"
        )
    return Tile("Guards", f"fired {times(summary.num_events)}", join_names([guard.guard for guard in summary.guards]))
