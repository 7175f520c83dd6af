"""The page of one training run, or of several with their curves in one figure, from their files alone.

Under the curves: what the guards did, every metric, the settings and where they differ, provenance, the commands.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mismatch_probe.notation import ABSENT, join_names, write_count, write_number
from mismatch_probe.reading import flat
from mismatch_probe.records.files import write_text
from mismatch_probe.records.training_run import MetricCourse, TrainingDirectory, TrainingSummary
from mismatch_probe.report.answers.train import Runs, steps_averaged, training_answer
from mismatch_probe.report.figures.limits import Effect, Mark, draw_firings
from mismatch_probe.report.names import visible
from mismatch_probe.report.rendering import PlotlyJs, render_page
from mismatch_probe.report.sections.provenance import both_sides, key_values, origin
from mismatch_probe.report.training.course import (
    Course,
    Firing,
    actions_words,
    firing_words,
    off_words,
    read_courses,
    times,
)
from mismatch_probe.report.training.dynamics import dynamics
from mismatch_probe.report.training.headline import summarise_course
from mismatch_probe.report.training.plots import MEANINGS
from mismatch_probe.report.view import Block, Cell, Column, Command, Figure, Heading, Note, Panel, Section, Table


def metrics(runs: Runs) -> Section:
    return Section(
        "metrics",
        "Every metric",
        "Under the names of metrics.jsonl, which holds every step.",
        [_metrics_of_run(course.label, summary) for course, summary in runs],
    )


def _metrics_of_run(label: str, summary: TrainingSummary) -> Table:
    """First, last, lowest and highest of every metric of a run."""
    of = steps_averaged(summary.window)
    columns: list[Column[tuple[str, MetricCourse]]] = [
        Column("metric", lambda row: _metric_link(row[0])),
        Column(f"first {of}", lambda row: write_number(row[1].first)),
        Column(f"last {of}", lambda row: write_number(row[1].last)),
        Column("lowest", lambda row: _at(row[1].lowest, row[1].lowest_step)),
        Column("highest", lambda row: _at(row[1].highest, row[1].highest_step)),
        Column("steps not finite", lambda row: write_count(row[1].nonfinite_steps)),
    ]
    return Table.of(f"Every metric of {label}", summary.metrics.items(), columns, is_folded=True)


def _metric_link(metric: str) -> Markup:
    return Markup('<code>{}</code><span class="meaning">{}</span>').format(visible(metric), MEANINGS.get(metric, ""))


def _at(value: float | None, step: int | None) -> Cell:
    if value is None:
        return ABSENT
    return Markup("{} <small>step {}</small>").format(write_number(value), step)


def settings(courses: Sequence[Course]) -> Section:
    blocks: list[Block] = [_differences(courses)] if len(courses) > 1 else []
    for course in courses:
        effective = course.manifest.effective
        engine, policy = (effective.get(side, {}) for side in ("engine", "policy"))
        blocks.append(both_sides(course.label, ("vLLM", engine), ("PyTorch", policy)))
        blocks.append(
            key_values(f"{course.label}: settings of the run, resolved", _settings_of_course(course), is_folded=True)
        )
    return Section(
        "settings",
        "Settings",
        "As they were resolved, and as the running engine and the loaded policy report them.",
        blocks,
    )


def _settings_of_course(course: Course) -> dict[str, Any]:
    return course.manifest.settings.model_dump(mode="json")


def _differences(courses: Sequence[Course]) -> Block:
    """Settings, checkpoint and problems that are not the same in all runs."""
    sides = [dict(_compared_settings(course)) for course in courses]
    names = dict.fromkeys(name for side in sides for name in side)
    differing = [name for name in names if any(side.get(name) != sides[0].get(name) for side in sides)]
    if not differing:
        return Note("The runs have the same settings, checkpoint, problems and guards.")
    columns: list[Column[str]] = [
        Column("setting", lambda name: Markup("<code>{}</code>").format(visible(name))),
        *Column.each(
            zip(courses, sides, strict=True),
            lambda item: item[0].label,
            lambda item, name: _setting_cell(item[1].get(name)),
            is_text=True,
        ),
    ]
    return Table.of("What differs between the runs", differing, columns)


def _compared_settings(course: Course) -> Iterator[tuple[str, Any]]:
    yield from flat(_settings_of_course(course))
    for name in ("model", "problems", "guards"):
        yield f"content of {name}", course.manifest.content_keys.get(name)
    for name, version in course.manifest.versions.items():
        yield f"version of {name}", version


def _setting_cell(value: object) -> Cell:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value)


def provenance(courses: Sequence[Course]) -> Section:
    start_words = "; ".join(
        f"{course.label} {course.manifest.created_at}, seed {course.manifest.settings.seed}" for course in courses
    )
    first = courses[0].manifest
    same = all(_origin_key(course) == _origin_key(courses[0]) for course in courses)
    blocks: list[Block] = []
    for course in courses[:1] if same else courses:
        if not same:
            blocks.append(Note(f"{course.label}:"))
        blocks += origin(course.manifest)
    return Section("provenance", "Provenance", f"Started {start_words}; mismatch-probe {first.tool_version}.", blocks)


def _origin_key(course: Course) -> tuple[Any, ...]:
    manifest = course.manifest
    return manifest.model, manifest.versions, manifest.hardware, manifest.git


def reproduce(courses: Sequence[Course]) -> Section:
    return Section(
        "reproduce",
        "Reproduce",
        "The same command with the same versions, on the same hardware, gives the same numbers where the engine is "
        "deterministic.",
        [Command(shlex.join(course.manifest.command)) for course in courses],
    )


_MOST_FIRINGS = 100


def guards(courses: Sequence[Course]) -> Section:
    blocks: list[Block] = []
    silent = [course.label for course in courses if not course.firings]
    if silent:
        of_runs = "" if len(courses) == 1 else f" in {join_names(silent)}"
        numbers = {number for course in courses if not course.firings and (number := course.num_guards_on)}
        on = f"; {' or '.join(map(str, sorted(numbers)))} were on" if numbers else ""
        blocks.append(Note(f"No guard fired{of_runs}{on}."))
    blocks += [
        Note(visible(f"{'' if len(courses) == 1 else f'{course.label}: '}{off_words(course.manifest.guards_off)}"))
        for course in courses
        if course.manifest.guards_off
    ]
    courses_with_firings = [course for course in courses if course.firings]
    if courses_with_firings:
        blocks.append(_training_figure(courses_with_firings, is_alone=len(courses) == 1))
    for course in courses_with_firings:
        if len(course.firings) > _MOST_FIRINGS:
            blocks.append(
                Note(
                    f"{course.label}: the table has the first {_MOST_FIRINGS} of {len(course.firings)} firings, the "
                    "drawing and events.jsonl have all."
                )
            )
    return Section(
        "guards",
        "What the guards did",
        "Guards look at every step's metrics before its update is applied, and ask for more each time that they fire.",
        blocks,
    )


def _training_figure(courses: Sequence[Course], *, is_alone: bool) -> Figure:
    return Figure(
        "figure-guards",
        "How to read it: rings are firings that only warned, diamonds those that changed the run, crosses those that "
        "stopped it. Point at one to see what the guard saw and what it asked for.",
        [_training_panel(course, is_alone=is_alone) for course in courses],
        [_firings(course) for course in courses],
    )


def _training_panel(course: Course, *, is_alone: bool) -> Panel:
    heading = Heading(
        f"plot-guards-{course.key}",
        "Firings" if is_alone else f"Firings in {course.label}",
        "; ".join(
            f"{firing.guard} at step {firing.step}: {'. '.join(firing_words(firing))}"
            for firing in course.firings[:_MOST_FIRINGS]
        ),
    )
    last = max([firing.step for firing in course.firings] + [int(step) for step in course.steps[-1:]])
    marks = [Mark(firing.guard, firing.step, _effect(firing), firing_words(firing)) for firing in course.firings]
    return draw_firings(heading, marks, last)


def _effect(firing: Firing) -> Effect:
    if firing.stopped_the_run:
        return "stopped"
    return "changed" if firing.changed_the_run else "reported"


def _firings(course: Course) -> Table:
    columns: list[Column[Firing]] = [
        Column("step", lambda firing: write_count(firing.step)),
        Column("guard", lambda firing: Markup("<code>{}</code>").format(visible(firing.guard)), is_text=True),
        Column("what it saw", lambda firing: firing.sentence, is_text=True),
        Column("what it asked for", lambda firing: actions_words(firing.actions), is_text=True),
    ]
    caption = f"{course.label}: guards fired {times(len(course.firings))}"
    return Table.of(caption, course.firings[:_MOST_FIRINGS], columns, is_stacked=True)


_SOURCES = ["manifest.json", "metrics.jsonl", "events.jsonl"]


def read_runs(directories: Sequence[TrainingDirectory], page: Path) -> Runs:
    """The runs with what came of each. Raises as `write_training_report`."""
    return [(course, summarise_course(course, str(page))) for course in read_courses(directories)]


def write_training_report(
    directories: Sequence[TrainingDirectory], path: Path, plotly_js: PlotlyJs = PlotlyJs.EMBED
) -> Runs:
    """Write the page of some runs, finished or not, to `path`; returns the runs with what came of each.

    Raises:
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read by this version.
        StorageError: the disk refused the write.
    """
    runs = read_runs(directories, path)
    write_text(path, render_training(runs, plotly_js))
    return runs


def summarise_training(directory: TrainingDirectory) -> TrainingSummary:
    """What came of a run. Raises as `write_training_report`."""
    return read_runs([directory], directory.report_path)[0][1]


def render_training(runs: Runs, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page; the same records give the same bytes."""
    courses = [course for course, _ in runs]
    sections = [
        guards(courses),
        *dynamics(courses),
        metrics(runs),
        settings(courses),
        provenance(courses),
        reproduce(courses),
    ]
    return render_page(
        replace(training_answer(runs), sections=sections),
        plotly_js,
        tool_version=courses[0].manifest.tool_version,
        sources=_SOURCES,
        document=[summary.model_dump(mode="json") for _, summary in runs],
    )
