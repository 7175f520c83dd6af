"""`doctor`: versions, hardware and settings as tables, what is wrong below them, and the answer last."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.notation import write_many, write_size
from mismatch_probe.records.summary import Examination
from mismatch_probe.report.view import Answer, Badge, Column, Lines, Table

_MEMORY: Final = "memory_bytes"
_VALUE_COLUMNS: Final = 60


def doctor_answer(examination: Examination) -> Answer:
    """What is installed and what it runs on; each problem in a line; whether there is any."""
    plugins = {f"{plugin.kind} {plugin.name}": f"{plugin.package} {plugin.version}" for plugin in examination.plugins}
    tables: dict[tuple[str, str], Mapping[str, Any]] = {
        ("package", "version"): examination.versions,
        ("hardware", ""): dict(_in_words(name, value) for name, value in examination.hardware.items()),
        **({("plug-in", "brought by"): plugins} if plugins else {}),
    }
    notes = [f"note: {remark}" for remark in examination.remarks]
    problems = list(_doctor_problems(examination))
    *first, last = [package.package for package in examination.imports]
    sound = f"No conflict found; {', '.join(first)} and {last} import."
    return Answer(
        subject="doctor",
        model="",
        headline=f"Not ready: {write_many(len(problems), 'problem')}." if problems else sound,
        badge=Badge("broken", "not ready") if problems else Badge("clean", "ready"),
        screen=[
            *(_values_table(titles, values) for titles, values in tables.items()),
            *_effective_settings(examination.effective_settings),
            Lines([*notes, *problems]),
        ],
        is_last=True,
    )


def _doctor_problems(examination: Examination) -> Iterator[str]:
    yield from (f"pin conflict: {conflict}" for conflict in examination.conflicts)
    yield from (
        f"cannot import {package.package}: {package.problem}" for package in examination.imports if not package.ok
    )
    yield from (f"plug-in: {plugin.problem}" for plugin in examination.plugins if plugin.problem is not None)


def _effective_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Table | Lines]:
    """In full for the first stage of each side's process; of the others what they have otherwise."""
    settings_by_side: dict[str, Mapping[str, Any]] = {}
    for stage, values in settings.items():
        like = next((name for name, others in settings_by_side.items() if others.keys() == values.keys()), None)
        if like is None:
            settings_by_side[stage] = values
            yield _values_table((stage, "effective"), values)
            continue
        other = {name: value for name, value in values.items() if value != settings_by_side[like][name]}
        if other:
            yield _values_table((stage, f"other than in {like}"), other)
        else:
            yield Lines([f"{stage}: as {like}"])


def _values_table(titles: tuple[str, str], values: Mapping[str, Any]) -> Table:
    """Names and values; a long value goes on in rows below, broken between words alone, so that a path stays one."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        first, *rest = textwrap.wrap(text, _VALUE_COLUMNS, break_long_words=False, break_on_hyphens=False) or [""]
        rows += [(name, first), *(("", line) for line in rest)]
    columns: list[Column[tuple[str, str]]] = [
        Column(titles[0], lambda row: row[0]),
        Column(titles[1], lambda row: row[1]),
    ]
    return Table.of("", rows, columns)


def _in_words(name: str, value: Any) -> tuple[str, Any]:
    """A fact about the hardware."""
    if name == _MEMORY:
        return "memory", write_size(value)
    return name.replace("_", " "), "none" if value == [] else value
