"""The top of a training page: what came of each run, and the two curves that carry it."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from markupsafe import Markup

from mismatch_probe.notation import ABSENT, Written, write_count, write_number, write_seconds
from mismatch_probe.records.training_run import MetricCourse, TrainingSummary
from mismatch_probe.report.training.comparable import what_differs
from mismatch_probe.report.training.course import Course
from mismatch_probe.report.training.dynamics import figure
from mismatch_probe.report.training.plots import OVERVIEW
from mismatch_probe.report.training.summarise import MISMATCH, REWARD
from mismatch_probe.report.view import Badge, Cell, Overview, Table

_BADGES = {
    "finished": Badge("clean", "finished"),
    "stopped": Badge("bug", "stopped by a guard"),
    "unfinished": Badge("undecided", "unfinished"),
}
_WORST_FIRST = ("stopped", "unfinished", "finished")

Runs = Sequence[tuple[Course, TrainingSummary]]


def overview(runs: Runs) -> Overview:
    outcomes = [summary.outcome for _, summary in runs]
    models = dict.fromkeys(summary.model for _, summary in runs)
    courses = [course for course, _ in runs]
    return Overview(
        subject="training run" if len(runs) == 1 else "training runs",
        model=", ".join(models),
        headline=_headline(runs),
        badge=_BADGES[min(outcomes, key=_WORST_FIRST.index)],
        facts=_facts(runs),
        advice=[
            sentence if len(runs) == 1 else f"{course.label}: {sentence}"
            for course, summary in runs
            for sentence in events(summary)
        ],
        table=_table(runs),
        footnote=_footnote(runs),
        contrasts=[sentence for first, other in combinations(courses, 2) for sentence in _contrast(first, other)],
        figure=figure(
            "overview",
            "dotted red lines are steps at which a guard changed the run, diamonds the values on which one fired."
            + (" Colour, dash and marker tell the runs apart." if len(runs) > 1 else ""),
            OVERVIEW,
            courses,
        ),
    )


def _headline(runs: Runs) -> Markup:
    if len(runs) == 1:
        return run_headline(runs[0][1])
    return Markup("; ").join(Markup("{}: {}").format(course.label, _course(summary)) for course, summary in runs) + "."


def steps_averaged(window: int) -> str:
    """`step`, or `5 steps`: after `first` and `last`."""
    return "step" if window == 1 else f"{window} steps"


def run_headline(summary: TrainingSummary) -> Markup:
    """How a run ended, and what reward and mismatch did."""
    done, asked = write_count(summary.steps), write_count(summary.steps_asked)
    if not summary.steps:
        return Markup("No step is recorded yet.")
    outcome = {
        "finished": f"Finished {done} steps",
        "stopped": f"A guard stopped the run at step {done} of {asked}",
        "unfinished": f"Unfinished after step {done} of {asked}",
    }[summary.outcome]
    guards = f"guards fired {times(summary.num_events)}" if summary.num_events else "no guard fired"
    return Markup("{}: {}; {}.").format(outcome, _course(summary), guards)


def events(summary: TrainingSummary) -> list[str]:
    """Why a run stopped, and each guard that fired."""
    sentences = [summary.diagnosis] if summary.diagnosis else []
    return sentences + [
        f"Guard {guard.guard} fired {times(guard.firings)}, first at step {guard.first_step}: {guard.sentence} "
        f"({', '.join(guard.actions)})."
        for guard in summary.guards
    ]


def times(number: int) -> str:
    return "once" if number == 1 else f"{write_count(number)} times"


def _course(summary: TrainingSummary) -> Markup:
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


def _facts(runs: Runs) -> list[str]:
    """What all runs share."""
    described = [
        (
            f"{manifest.objective} on {manifest.task}",
            f"train {manifest.train_dtype.upper()} / infer {manifest.infer_dtype.upper()}",
            f"seed {manifest.seed}",
            f"{write_count(manifest.num_tokens)} response tokens",
            write_seconds(manifest.seconds),
        )
        for _, manifest in runs
    ]
    return [facts[0] for facts in zip(*described, strict=True) if len(set(facts)) == 1]


def _table(runs: Runs) -> Table:
    rows: list[list[Cell]] = [
        [
            course.label,
            _BADGES[summary.outcome],
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


def _contrast(course: Course, other: Course) -> list[str]:
    """How many times the mismatch of one run is that of the other, at the steps that both have, or why that is open."""
    differing = what_differs(course.manifest, other.manifest)
    if differing:
        return [
            f"{course.label} and {other.label} do not learn the same, so their mismatch is given no ratio: "
            + "; ".join(differing)
        ]
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
        f"kl_k3 of {larger} is {middle} times that of {smaller} (median over {write_count(int(usable.sum()))} shared "
        f"steps, from {low} to {high})"
    ]
