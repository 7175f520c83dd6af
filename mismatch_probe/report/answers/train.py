"""`train` and `sanity`: what came of each run, what differs, and whether the runs can be compared."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    capital,
    join_names,
    write_count,
    write_many,
    write_number,
    write_percent,
    write_seconds,
)
from mismatch_probe.reading import differences
from mismatch_probe.records.training_run import (
    PASS_ACCURACY,
    TOO_FEW_STEPS,
    Canary,
    SanityRecord,
    TrainingManifest,
    TrainingSummary,
)
from mismatch_probe.report.training.course import Course, actions_words, off_words, setting_words, times
from mismatch_probe.report.training.dynamics import figure
from mismatch_probe.report.training.headline import (
    MISMATCH,
    REWARD,
    reward_fell,
    run_headline,
    runs_headline,
    training_tiles,
)
from mismatch_probe.report.training.plots import OVERVIEW
from mismatch_probe.report.view import Answer, Badge, Cell, Column, Lines, Table, Terms, Tile

_DECISIVE: Final = ("task", "rollout", "objective", "optimizer", "critic")
"""Tables of settings that decide what is sampled and learnt. Others say in which arithmetic, how far, what is kept."""


def what_differs(manifest: TrainingManifest, other: TrainingManifest) -> list[str]:
    """What is not the same of model, problems and decisive settings, by name; dtypes may differ.

    Runs of another seed draw other problems of the same task.
    """
    differing = ["model"] if _model(manifest) != _model(other) else []
    differing += [name for name, _, _ in differences(_decisive(manifest), _decisive(other))]
    if (
        not differing
        and manifest.settings.seed == other.settings.seed
        and _train_problems(manifest) != _train_problems(other)
    ):
        differing.append("the problems themselves")
    return differing


def _decisive(manifest: TrainingManifest) -> dict[str, Any]:
    settings = manifest.settings.model_dump(mode="json")
    return {name: settings[name] for name in _DECISIVE} | {"policy.lora": settings["policy"]["lora"]}


def _model(manifest: TrainingManifest) -> str:
    return manifest.model.fingerprint


def _train_problems(manifest: TrainingManifest) -> str | None:
    return manifest.content_keys.get("problems")


_BADGES = {
    "finished": Badge("clean", "finished"),
    "stopped": Badge("bug", "stopped by a guard"),
    "unfinished": Badge("undecided", "unfinished"),
}

Runs = Sequence[tuple[Course, TrainingSummary]]


def training_answer(runs: Runs) -> Answer:
    """Of one run or of several; of a sanity test alone, whether it is passed."""
    tests = [course.sanity for course, _ in runs if course.sanity is not None]
    answer = _answer_of_runs(runs)
    return sanity_answer(tests[0], answer) if len(runs) == len(tests) == 1 else answer


def _answer_of_runs(runs: Runs) -> Answer:
    models = dict.fromkeys(summary.model for _, summary in runs)
    courses = [course for course, _ in runs]
    is_alone = len(runs) == 1
    return Answer(
        subject="training run" if is_alone else "training runs",
        model=", ".join(models),
        headline=run_headline(runs[0][1]) if is_alone else runs_headline(label_runs(runs)),
        tiles=training_tiles(runs[0][1], courses[0].num_guards_on) if is_alone else [],
        badge=min((_badge_of(summary) for _, summary in runs), key=lambda badge: badge.rank),
        facts=_train_facts(runs),
        advice=[
            summary.diagnosis if is_alone else f"{course.label}: {summary.diagnosis}"
            for course, summary in runs
            if summary.diagnosis
        ],
        table=_train_table(runs),
        footnote=" ".join([_footnote(runs), *_no_ratios(courses)]),
        remarks=[sentence for first, other in combinations(courses, 2) for sentence in _contrast(first, other)],
        figure=figure("overview", " ".join(_reading_of_marks(courses)), OVERVIEW, courses),
        screen=[part for run in runs for part in _train_screen(*run, is_alone=is_alone)],
    )


def _train_screen(course: Course, summary: TrainingSummary, *, is_alone: bool) -> list[Lines]:
    """How a run of several ended, each guard that fired, and those that could not."""
    ending_lines = [] if is_alone else [Lines([f"{course.label}: {_in_text(run_headline(summary))}"], "bold")]
    sanity_lines = [] if is_alone or course.sanity is None else [Lines([_sanity_headline(course.sanity)], follows=True)]
    return [*ending_lines, *sanity_lines, Lines(events(summary), follows=True)]


def _in_text(headline: str | Markup) -> str:
    return headline.striptags() if isinstance(headline, Markup) else headline


def label_runs(runs: Runs) -> list[tuple[str, TrainingSummary]]:
    return [(course.label, summary) for course, summary in runs]


def _reading_of_marks(courses: Sequence[Course]) -> list[str]:
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
    """Each guard that fired, and those that could not."""
    sentences = [off_words(summary.guards_off)] if summary.guards_off else []
    return sentences + [
        f"Guard {guard.guard} fired {times(guard.firings)}, first at step {guard.first_step}: {guard.sentence} "
        f"({actions_words(guard.actions)})."
        for guard in summary.guards
    ]


def _train_facts(runs: Runs) -> list[str]:
    """What all runs share."""
    descriptions = [
        (
            f"{manifest.objective} on {manifest.task}",
            f"train {manifest.train_dtype.upper()} / infer {manifest.infer_dtype.upper()}",
            f"seed {manifest.seed}",
            f"{write_count(manifest.num_tokens)} response tokens",
            f"{write_seconds(manifest.seconds)} of training",
        )
        for _, manifest in runs
    ]
    return [facts[0] for facts in zip(*descriptions, strict=True) if len(set(facts)) == 1]


def _train_table(runs: Runs) -> Table:
    columns: list[Column[tuple[Course, TrainingSummary]]] = [
        Column("run", lambda run: run[0].label),
        Column("outcome", lambda run: _outcome_badge(*run), is_text=True),
        Column("steps", lambda run: WrittenNumber(write_count(run[1].steps), f"of {write_count(run[1].steps_asked)}")),
        Column("reward", lambda run: _last(run[1], REWARD)),
        Column("best reward", lambda run: _best_reward_cell(run[1])),
        Column("KL (k3)", lambda run: _last(run[1], MISMATCH)),
        Column("range of pi − mu", lambda run: _extremes(run[1])),
        Column("guards", lambda run: _guards_cell(*run)),
        Column("skipped", lambda run: write_count(run[1].skipped_updates)),
    ]
    return Table.of("One row a run", runs, columns, is_stacked=True)


def _badge_of(summary: TrainingSummary) -> Badge:
    """How the run ended; a calm colour is for one that kept its reward."""
    if summary.outcome == "finished" and reward_fell(summary):
        return Badge("bug", "finished, reward fell")
    return _BADGES[summary.outcome]


def _outcome_badge(course: Course, summary: TrainingSummary) -> Badge:
    return _badge_of(summary) if course.sanity is None else sanity_badge(course.sanity)


def _last(summary: TrainingSummary, name: str) -> Cell:
    if name not in summary.metrics:
        return ABSENT
    course = summary.metrics[name]
    return WrittenNumber(write_number(course.last), f"from {write_number(course.first)}")


def _best_reward_cell(summary: TrainingSummary) -> Cell:
    if summary.best_reward is None:
        return ABSENT
    return WrittenNumber(write_number(summary.best_reward), f"step {write_count(summary.best_reward_step or 0)}")


def _extremes(summary: TrainingSummary) -> Cell:
    low, high = (summary.metrics.get(f"mismatch/prob_diff_{end}") for end in ("min", "max"))
    if low is None or high is None or low.lowest is None or high.highest is None:
        return ABSENT
    return WrittenNumber(f"{write_number(low.lowest)} to {write_number(high.highest)}")


def _guards_cell(course: Course, summary: TrainingSummary) -> Cell:
    if summary.num_events:
        return WrittenNumber(write_count(summary.num_events), "firing" if summary.num_events == 1 else "firings")
    return WrittenNumber("silent", f"{course.num_guards_on} on") if course.num_guards_on else "silent"


def _footnote(runs: Runs) -> str:
    windows = sorted({summary.window for _, summary in runs})
    windows_in_words = " or ".join(steps_averaged(window) for window in windows)
    return (
        f"Reward and KL: mean of the last {windows_in_words}, from that of the first. Best reward: the highest mean of "
        "as many in a row. Skipped: updates whose gradients were not finite."
    )


def _no_ratios(courses: Sequence[Course]) -> list[str]:
    """Why there is no ratio of one run's mismatch to another's."""
    reasons = [
        f"{first.label} and {other.label} ({join_names([setting_words(name) for name in names])})"
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
    over = f"the median over {write_count(int(usable.sum()))} shared steps, from {low} to {high}"
    if middle == "1":
        return [f"KL per token of {larger} is that of {smaller} ({over} times)"]
    return [f"KL per token of {larger} is {middle} times that of {smaller} ({over.removeprefix('the ')})"]


_UNFINISHED = "unfinished"
_NOT_PASSED = "not passed: "


def sanity_answer(record: SanityRecord, training: Answer | None = None) -> Answer:
    """Whether the test is passed, and why not. training: the answer of its training, which is shown below."""
    passes = f"More than {write_percent(PASS_ACCURACY)} passes."
    answer = Answer("sanity test", "", "", sanity_badge(record)) if training is None else training
    blocks = [] if training is None else [Lines([_in_text(training.headline)], follows=True), *training.screen]
    return replace(
        answer,
        subject="sanity test",
        badge=sanity_badge(record),
        headline=_sanity_headline(record),
        tiles=_sanity_tiles(record),
        screen=[Lines([passes], follows=True), *blocks],
    )


def _sanity_headline(record: SanityRecord) -> str:
    """What came of the test, and how many of the latest responses were right."""
    return f"Sanity test {_verdict(record)}. {capital(_solved_words(record))}."


def _solved_words(record: SanityRecord) -> str:
    accuracy = record.accuracy
    if accuracy is None:
        return "not every problem was seen"
    bounds = (
        ""
        if accuracy.low is None or accuracy.high is None
        else f" [{_write_share_of_1(accuracy.low)}, {_write_share_of_1(accuracy.high)}]"
    )
    problems = write_many(len(record.latest), "problem")
    return f"{_write_share_of_1(accuracy.value)}{bounds} of the latest responses to {problems} solved"


def _verdict(record: SanityRecord) -> str:
    if record.passed is None:
        return _UNFINISHED
    return record.verdict if record.passed else f"failed: {record.verdict.removeprefix(_NOT_PASSED)}"


def sanity_badge(record: SanityRecord) -> Badge:
    """In place of how the training ended, which says nothing of the test."""
    if record.passed is None:
        return Badge("undecided", _UNFINISHED)
    return Badge("clean", "passed") if record.passed else Badge("bug", "failed")


def _sanity_tiles(record: SanityRecord) -> list[Tile]:
    accuracy, threshold = record.accuracy, f"more than {write_percent(PASS_ACCURACY)} passes"
    if accuracy is None:
        share = Tile("Solved", "not known", f"{write_many(len(record.latest), 'problem')} seen; {threshold}")
    else:
        interval = (
            ""
            if accuracy.low is None or accuracy.high is None
            else f"{_write_share_of_1(accuracy.low)} to {_write_share_of_1(accuracy.high)}"
        )
        share = Tile(
            "Solved", _write_share_of_1(accuracy.value), "; ".join(part for part in (interval, threshold) if part)
        )
    checkpoint_tile = Tile(
        "Problems kept",
        "none yet" if record.kept is None else f"{len(record.kept):,}",
        f"of {len(record.rates):,} tried, those solved {write_percent(record.settings.keep_low)} to "
        f"{write_percent(record.settings.keep_high)} of the time",
    )
    return [share, checkpoint_tile, _next_step_tile(record)]


def _next_step_tile(record: SanityRecord) -> Tile:
    progress = f"after step {record.step:,}"
    if record.passed:
        return Tile("Next step", "Train on", f"{progress} what is known to be learnable was learnt")
    if record.passed is None:
        command = Markup('{}: the same command with <span class="whole">--resume</span>').format(progress)
        return Tile("Next step", "Go on", command)
    if record.verdict.endswith(TOO_FEW_STEPS):
        flags = '<span class="whole">--resume</span> and a larger <span class="whole">--steps</span>'
        return Tile("Next step", "More steps", Markup(f"{{}}: the same command with {flags}").format(progress))
    return Tile("Next step", "Fix and repeat", f"{progress}: why it ended stands above")


def _write_share_of_1(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


_OF_CANARY: Final = (
    ("KL (k3)", "mismatch/kl_k3"),
    ("largest pi - mu", "mismatch/prob_diff_max"),
    ("KL (k3) on the probe", "sync/probe_k3"),
    ("entropy", "policy/entropy"),
)


def canary_answer(canary: Canary) -> Answer:
    """Which guards fire on the weights, what each says, and the step's main metrics."""
    number = len(canary.fired)
    guards = f"{write_many(number, 'guard')} {'fires' if number == 1 else 'fire'}" if number else "no guard fires"
    weights = f"the weights of step {canary.step}" if canary.step else "the weights of the model itself"
    metrics = [(words, write_number(canary.metrics[name])) for words, name in _OF_CANARY if name in canary.metrics]
    return Answer(
        subject="canary",
        model=canary.model,
        headline=f"Canary on {weights}: {guards}.",
        badge=Badge("bug", "guards fire") if number else Badge("clean", "no guard fires"),
        screen=[
            *(
                [Lines([f"{event['guard']}: {event['sentence']}" for event in canary.fired], follows=True)]
                if number
                else []
            ),
            Terms(metrics),
        ],
    )
