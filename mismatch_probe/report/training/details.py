"""Under the curves: every metric, the settings and where they differ, provenance, the commands."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from mismatch_probe.config.nested import flat
from mismatch_probe.notation import ABSENT, write_count, write_number
from mismatch_probe.records.training_run import TrainingSummary
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.sections.provenance import both_sides, key_values, origin
from mismatch_probe.report.training.course import Course
from mismatch_probe.report.training.overview import Runs, steps_averaged
from mismatch_probe.report.training.plots import MEANINGS
from mismatch_probe.report.view import Block, Cell, Command, Note, Section, Table


def metrics(runs: Runs) -> Section:
    return Section(
        "metrics",
        "Every metric",
        "Under the names of metrics.jsonl, which holds every step.",
        [_every_metric(course.label, summary) for course, summary in runs],
    )


def _every_metric(label: str, summary: TrainingSummary) -> Table:
    """First, last, lowest and highest of every metric of a run."""
    rows: list[list[Cell]] = [
        [
            Markup('<code>{}</code><span class="meaning">{}</span>').format(visible(name), MEANINGS.get(name, "")),
            write_number(metric.first),
            write_number(metric.last),
            _at(metric.lowest, metric.lowest_step),
            _at(metric.highest, metric.highest_step),
            write_count(metric.nonfinite_steps),
        ]
        for name, metric in summary.metrics.items()
    ]
    ends = [f"{end} {steps_averaged(summary.window)}" for end in ("first", "last")]
    columns = ["metric", *ends, "lowest", "highest", "steps not finite"]
    return Table(f"Every metric of {label}", columns, rows, folded=True)


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
        blocks.append(key_values(f"{course.label}: settings of the run, resolved", _settings(course), folded=True))
    return Section(
        "settings",
        "Settings",
        "As they were resolved, and as the running engine and the loaded policy report them.",
        blocks,
    )


def _settings(course: Course) -> dict[str, Any]:
    return course.manifest.settings.model_dump(mode="json")


def _differences(courses: Sequence[Course]) -> Block:
    """Settings, checkpoint and problems that are not the same in all runs."""
    sides = [dict(_compared(course)) for course in courses]
    names = dict.fromkeys(name for side in sides for name in side)
    rows: list[list[Cell]] = [
        [Markup("<code>{}</code>").format(visible(name)), *(_written(side.get(name)) for side in sides)]
        for name in names
        if any(side.get(name) != sides[0].get(name) for side in sides)
    ]
    if not rows:
        return Note("The runs have the same settings, checkpoint, problems and guards.")
    columns = ["setting", *(course.label for course in courses)]
    return Table("What differs between the runs", columns, rows, text_columns=frozenset(range(1, len(columns))))


def _compared(course: Course) -> Iterator[tuple[str, Any]]:
    yield from flat(_settings(course))
    for name in ("model", "problems", "guards"):
        yield f"content of {name}", course.manifest.content_keys.get(name)
    for name, version in course.manifest.versions.items():
        yield f"version of {name}", version


def _written(value: object) -> Cell:
    return ABSENT if value is None else visible(value if isinstance(value, str) else json.dumps(value))


def provenance(courses: Sequence[Course]) -> Section:
    started = "; ".join(
        f"{course.label} {course.manifest.created_at}, seed {course.manifest.settings.seed}" for course in courses
    )
    first = courses[0].manifest
    same = all(_origin_key(course) == _origin_key(courses[0]) for course in courses)
    blocks: list[Block] = []
    for course in courses[:1] if same else courses:
        if not same:
            blocks.append(Note(f"{course.label}:"))
        blocks += origin(course.manifest)
    return Section("provenance", "Provenance", f"Started {started}; mismatch-probe {first.tool_version}.", blocks)


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
