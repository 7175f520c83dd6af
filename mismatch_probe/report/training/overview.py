"""The top of a training page: what came of each run, what differs, and whether the runs can be compared."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

import numpy as np

from mismatch_probe.config.nested import differences
from mismatch_probe.notation import ABSENT, Written, write_count, write_number, write_seconds
from mismatch_probe.records.training_run import TrainingManifest, TrainingSummary
from mismatch_probe.report.names import listed
from mismatch_probe.report.training.course import Course, actions_words, off_words, times
from mismatch_probe.report.training.dynamics import figure
from mismatch_probe.report.training.headline import MISMATCH, REWARD, run_headline, runs_headline, training_tiles
from mismatch_probe.report.training.plots import OVERVIEW
from mismatch_probe.report.training.sanity import sanity_answer, sanity_badge, setting_words
from mismatch_probe.report.view import Badge, Cell, Overview, Table

_DECISIVE: Final = ("task", "rollout", "objective", "optimizer", "critic")
"""Tables of settings that decide what is sampled and learnt. Others say in which arithmetic, how far, what is kept."""


def what_differs(manifest: TrainingManifest, other: TrainingManifest) -> list[str]:
    """What is not the same of model, problems and decisive settings, by name; dtypes may differ.

    Runs of another seed draw other problems of the same task.
    """
    differing = ["model"] if _model(manifest) != _model(other) else []
    differing += [name for name, _, _ in differences(_decisive(manifest), _decisive(other))]
    if not differing and manifest.settings.seed == other.settings.seed and _problems(manifest) != _problems(other):
        differing.append("the problems themselves")
    return differing


def _decisive(manifest: TrainingManifest) -> dict[str, Any]:
    settings = manifest.settings.model_dump(mode="json")
    return {name: settings[name] for name in _DECISIVE} | {"policy.lora": settings["policy"]["lora"]}


def _model(manifest: TrainingManifest) -> str:
    return manifest.model.fingerprint


def _problems(manifest: TrainingManifest) -> str | None:
    return manifest.content_keys.get("problems")


_BADGES = {
    "finished": Badge("clean", "finished"),
    "stopped": Badge("bug", "stopped by a guard"),
    "unfinished": Badge("undecided", "unfinished"),
}
_WORST_FIRST = ("stopped", "unfinished", "finished")

Runs = Sequence[tuple[Course, TrainingSummary]]


def overview(runs: Runs) -> Overview:
    tests = [course.sanity for course, _ in runs if course.sanity is not None]
    if len(runs) == len(tests) == 1:
        return replace(_overview(runs), **sanity_answer(tests[0]))
    return _overview(runs)


def _overview(runs: Runs) -> Overview:
    outcomes = [summary.outcome for _, summary in runs]
    models = dict.fromkeys(summary.model for _, summary in runs)
    courses = [course for course, _ in runs]
    alone = len(runs) == 1
    return Overview(
        subject="training run" if alone else "training runs",
        model=", ".join(models),
        headline=run_headline(runs[0][1]) if alone else runs_headline(named(runs)),
        tiles=training_tiles(runs[0][1]) if alone else [],
        badge=_BADGES[min(outcomes, key=_WORST_FIRST.index)],
        facts=_facts(runs),
        advice=[
            summary.diagnosis if alone else f"{course.label}: {summary.diagnosis}"
            for course, summary in runs
            if summary.diagnosis
        ],
        table=_table(runs),
        footnote=" ".join([_footnote(runs), *_no_ratios(courses)]),
        contrasts=[sentence for first, other in combinations(courses, 2) for sentence in _contrast(first, other)],
        figure=figure("overview", " ".join(_reading(courses)), OVERVIEW, courses),
    )


def named(runs: Runs) -> list[tuple[str, TrainingSummary]]:
    return [(course.label, summary) for course, summary in runs]


def _reading(courses: Sequence[Course]) -> list[str]:
    """What the marks mean that are there."""
    sentences = ["point at a curve for its values; drag to zoom, double-click to come back."]
    if any(firing.changed_the_run for course in courses for firing in course.firings):
        sentences.append(
            "Upright dotted lines are steps at which a guard changed the run; the triangle above says how."
        )
    if any(course.manifest.guards for course in courses):
        sentences.append("Dashed red lines are limits of guards that are near; diamonds, values on which one fired.")
    if len(courses) > 1:
        sentences.append("Colour, dash and marker tell the runs apart.")
    return sentences


def steps_averaged(window: int) -> str:
    """`step`, or `5 steps`: after `first` and `last`."""
    return "step" if window == 1 else f"{window} steps"


def events(summary: TrainingSummary) -> list[str]:
    """Why a run stopped, each guard that fired, and those that could not."""
    sentences = [summary.diagnosis] if summary.diagnosis else []
    sentences += [off_words(summary.guards_off)] if summary.guards_off else []
    return sentences + [
        f"Guard {guard.guard} fired {times(guard.firings)}, first at step {guard.first_step}: {guard.sentence} "
        f"({actions_words(guard.actions)})."
        for guard in summary.guards
    ]


def _facts(runs: Runs) -> list[str]:
    """What all runs share."""
    described = [
        (
            f"{manifest.objective} on {manifest.task}",
            f"train {manifest.train_dtype.upper()} / infer {manifest.infer_dtype.upper()}",
            f"seed {manifest.seed}",
            f"{write_count(manifest.num_tokens)} response tokens",
            f"{write_seconds(manifest.seconds)} of training",
        )
        for _, manifest in runs
    ]
    return [facts[0] for facts in zip(*described, strict=True) if len(set(facts)) == 1]


def _table(runs: Runs) -> Table:
    rows: list[list[Cell]] = [
        [
            course.label,
            _BADGES[summary.outcome] if course.sanity is None else sanity_badge(course.sanity),
            Written(write_count(summary.steps), f"of {write_count(summary.steps_asked)}"),
            _last(summary, REWARD),
            _best(summary),
            _last(summary, MISMATCH),
            _extremes(summary),
            _guards(summary),
            write_count(summary.skipped_updates),
        ]
        for course, summary in runs
    ]
    columns = [
        "run",
        "outcome",
        "steps",
        "reward",
        "best reward",
        "KL (k3)",
        "range of pi − mu",
        "guards",
        "skipped",
    ]
    return Table("One row a run", columns, rows, text_columns=frozenset({1}), stacked=True)


def _last(summary: TrainingSummary, name: str) -> Cell:
    if name not in summary.metrics:
        return ABSENT
    course = summary.metrics[name]
    return Written(write_number(course.last), f"from {write_number(course.first)}")


def _best(summary: TrainingSummary) -> Cell:
    if summary.best_reward is None:
        return ABSENT
    return Written(write_number(summary.best_reward), f"step {write_count(summary.best_reward_step or 0)}")


def _extremes(summary: TrainingSummary) -> Cell:
    low, high = (summary.metrics.get(f"mismatch/prob_diff_{end}") for end in ("min", "max"))
    if low is None or high is None or low.lowest is None or high.highest is None:
        return ABSENT
    return Written(f"{write_number(low.lowest)} to {write_number(high.highest)}")


def _guards(summary: TrainingSummary) -> Cell:
    return Written(write_count(summary.num_events), "firings") if summary.num_events else "silent"


def _footnote(runs: Runs) -> str:
    windows = sorted({summary.window for _, summary in runs})
    over = " or ".join(steps_averaged(window) for window in windows)
    return (
        f"Reward and KL: mean of the last {over}, from that of the first. Best reward: the highest mean of as many in "
        "a row. Skipped: updates whose gradients were not finite."
    )


def _no_ratios(courses: Sequence[Course]) -> list[str]:
    """Why the mismatch of one run is not said to be so many times that of another."""
    reasons = [
        f"{first.label} and {other.label} ({listed([setting_words(name) for name in names])})"
        for first, other in combinations(courses, 2)
        if (names := what_differs(first.manifest, other.manifest))
    ]
    if not reasons:
        return []
    return [f"No ratio of mismatches where runs do not learn the same: {'; '.join(reasons)}."]


def _contrast(course: Course, other: Course) -> list[str]:
    """How many times the mismatch of one run is that of the other, at the steps that both have."""
    if what_differs(course.manifest, other.manifest):
        return []
    _, rows, other_rows = np.intersect1d(course.steps, other.steps, return_indices=True)
    first, second = course.metric(MISMATCH)[rows], other.metric(MISMATCH)[other_rows]
    usable = (first > 0) & (second > 0) & np.isfinite(first) & np.isfinite(second)
    if not usable.any():
        return []
    ratios = first[usable] / second[usable]
    larger, smaller = course.label, other.label
    if np.median(ratios) < 1:
        ratios, larger, smaller = 1 / ratios, smaller, larger
    middle, low, high = (write_number(float(value)) for value in (np.median(ratios), ratios.min(), ratios.max()))
    return [
        f"KL per token of {larger} is {middle} times that of {smaller} (median over "
        f"{write_count(int(usable.sum()))} shared steps, from {low} to {high})"
    ]
