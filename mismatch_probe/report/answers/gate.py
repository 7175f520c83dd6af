"""`gate`: its checks as one table, a sentence for each that is not kept, and a section of the page of the run."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mismatch_probe.config.sides import LOG_SIDE
from mismatch_probe.dtypes import sides_label
from mismatch_probe.inert import command_line
from mismatch_probe.notation import (
    ABSENT,
    bounds_nothing,
    join_names,
    round_outwards,
    write_bounds,
    write_change,
    write_fold,
    write_many,
    write_number,
    write_value,
)
from mismatch_probe.records.answers import GROWTH, VERDICT, CheckResult, FloorEntry, GateResult, NoiseFloor
from mismatch_probe.report.view import Answer, Badge, Block, Column, Command, Finding, Lines, Note, Section, Table

_WARNINGS: Final = "Warnings"
_HEADINGS: Final = {"fail": "Broken", "inconclusive": "Inconclusive"}
_KINDS: Final = {"pass": "clean", "fail": "bug", "inconclusive": "undecided", "error": "broken"}


_BEGIN: Final = {"fail": "broken", "inconclusive": "inconclusive"}
"""What the sentence of a blocking check that is not kept begins with."""


def gate_answer(result: GateResult) -> Answer:
    """The checks, a sentence for each that is not kept, and the answer last, where the eye stops."""
    table = checks_table(result.checks)
    groups = [group for group in _checks_in_groups(result.checks) if group[0].answer != "pass"]
    sentences = [f"{_begin(group[0])}: {_sentence_of(group)}" for group in groups]
    lines = [*sentences, *no_baseline(result), *result.notes]
    return Answer(
        subject="gate",
        model=result.model or result.run,
        headline=result.sentence,
        badge=gate_badge(result),
        table=table,
        command=result.next_command or "",
        screen=[
            *([replace(table, caption="")] if result.checks else []),
            *([Lines([table.reading], "dim", follows=True)] if table.reading else []),
            Lines(lines, follows=True),
        ],
        is_last=True,
    )


def _checks_in_groups(checks: Sequence[CheckResult]) -> Iterator[list[CheckResult]]:
    """Each check alone, but those together that wait for the same thing and block alike."""
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for check in checks:
        if check.waits_for:
            groups.setdefault((check.level, check.waits_for), []).append(check)
    for check in checks:
        group = groups.get((check.level, check.waits_for), [check])
        if group[0] is check:
            yield group


def _sentence_of(group: Sequence[CheckResult]) -> str:
    """The sentence of a check, or one for several that wait for the same thing."""
    if len(group) == 1:
        return group[0].sentence
    pairs_of: dict[str, list[str]] = {}
    for check in group:
        pairs_of.setdefault(check.measured, []).append(sides_label(*check.pair.split("/")))
    which = "; ".join(f"{value} of {join_names(list(dict.fromkeys(pairs)))}" for value, pairs in pairs_of.items())
    return f"{which}: {group[0].waits_for}"


def checks_table(checks: list[CheckResult]) -> Table:
    """One row a check; where some only warn, a column says which ones block."""
    is_mixed = len({check.level for check in checks}) > 1
    blocks: list[Column[CheckResult]] = [
        Column("blocks", lambda check: "yes" if check.level == "error" else "no", is_text=True)
    ]
    columns: list[Column[CheckResult]] = [
        Column("answer", lambda check: Badge(_KINDS[check.answer], _answer_with_level(check))),
        *(blocks if is_mixed else []),
        Column("pair", pair_label, is_text=True),
        Column("limit", limit_text, is_text=True),
        Column("value", _value_text),
        Column("bounds", _bounds_text),
        Column("would pass at", passing_text),
    ]
    return Table.of("Checks", checks, columns, is_stacked=True, reading=_how_to_read(checks))


def _how_to_read(checks: Sequence[CheckResult]) -> str:
    """What bounds and passing limits are, where a check has any."""
    parts = []
    if any(_bounds_text(check) != "none" for check in checks):
        parts.append("bounds: the chance that any is wrong, of all blocking checks and looks, is at most alpha")
    if any(map(passing_text, checks)):
        parts.append("would pass at: the tightest limit that this run passes")
    return "; ".join(parts)


def floor_answer(floor: NoiseFloor, path: Path) -> Answer:
    """What calibration measured of each check, and where it is written."""
    columns: list[Column[FloorEntry]] = [
        Column("pair", lambda row: row.pair),
        Column("measured", lambda row: row.measured),
        Column("same leg twice", lambda row: write_number(row.same_leg)),
        Column("change between runs", lambda row: "n/a" if row.change is None else f"{row.change:.2%}"),
    ]
    return Answer(
        subject="floor",
        model=floor.model_fingerprint,
        headline=f"Floor: {path}",
        badge=Badge("clean", "measured"),
        screen=[Table.of("", floor.entries, columns)],
        is_last=True,
    )


def _begin(check: CheckResult) -> str:
    return "warning" if check.level == "warn" else _BEGIN[check.answer]


def no_baseline(result: GateResult) -> list[str]:
    """What is not judged until there is a baseline, and how to make one; empty where nothing is left out."""
    if not result.left_out:
        return []
    make = command_line("compare", "--model", result.model or "MODEL", "--num-prompts", "1024", "--out", "baseline")
    return [
        f"no baseline yet, so {' and '.join(result.left_out)} was not judged: make one from the state you trust, with "
        f"the settings of this run ({make}), and give it with --baseline"
    ]


def gate_section(result: GateResult) -> Section:
    """The answer, every check, and what it rests on."""
    groups = list(_checks_in_groups(result.checks))
    sentences: dict[str, list[str]] = {heading: [] for heading in (*_HEADINGS.values(), _WARNINGS)}
    for group in groups:
        if group[0].answer in _HEADINGS:
            heading = _WARNINGS if group[0].level == "warn" else _HEADINGS[group[0].answer]
            sentences[heading].append(_sentence_of(group))
    lists = [(heading, lines) for heading, lines in sentences.items() if lines]
    blocks: list[Block] = [Finding("gate-answer", "Gate", gate_badge(result), result.sentence, lists)]
    if result.next_command is not None:
        blocks.append(Command(result.next_command))
    if result.checks:
        blocks.append(checks_table(result.checks))
    if result.notes:
        blocks.append(Note("What the gate could not check, or left out:", result.notes))
    return Section("gate", "The answer of the gate", f"Judged by {result.gate_file}{_rests_on(result)}.", blocks)


def gate_badge(result: GateResult) -> Badge:
    failures = {check.metric for check in result.checks if check.answer == "fail"} if result.answer == "pass" else set()
    kind = "undecided" if VERDICT in failures else "growing" if GROWTH in failures else _KINDS[result.answer]
    return Badge(kind, f"gate: {result.answer}")


def gate_fact(result: GateResult) -> str:
    """For the top of the page."""
    return f"gate {Path(result.gate_file).name}: {result.answer}"


def _rests_on(result: GateResult) -> str:
    look = result.look
    against = "" if result.baseline is None else f" against {result.baseline}"
    return against if look is None else f"{against}, on {write_many(look.num_sequences, 'response')}"


def _answer_with_level(check: CheckResult) -> str:
    return f"warn ({check.answer})" if check.level == "warn" and check.answer != "pass" else check.answer


def pair_label(check: CheckResult) -> str:
    """As the slice of a gate file names the pair; of a log that does not say its dtypes there is one alone."""
    return LOG_SIDE if check.pair == f"{LOG_SIDE}/{LOG_SIDE}" else check.pair


def limit_text(check: CheckResult) -> str:
    if check.metric == VERDICT:
        return "verdict is no bug"
    return f"{check.measured} {check.kind} {check.limit:g}"


def _value_text(check: CheckResult) -> str:
    """The metric; with a baseline also how much worse it is."""
    if check.is_untested:
        return ABSENT
    if check.metric == GROWTH:
        return _growth_text(check)
    if check.metric == VERDICT:
        return "bug" if check.value else "no bug"
    if check.baseline_value is None:
        return write_value(check.run_metric)
    if check.comparison is None:
        return write_number(check.value)
    return f"{write_value(check.run_metric)} ({write_change(check.value)}, {check.comparison})"


def _growth_text(check: CheckResult) -> str:
    if check.answer == "pass":
        return "none shown"
    return "from 0" if check.value == sys.float_info.max else write_fold(check.value)


def _bounds_text(check: CheckResult) -> str:
    if check.low is None or check.high is None:
        return "none"
    if check.kind == "max_regression":
        return f"{check.low:+.1%} to {check.high:+.1%}"
    return write_bounds(replace(check.run_metric, value=check.value, low=check.low, high=check.high), check.limit)


def passing_text(check: CheckResult) -> str:
    """The tightest limit that would pass, rounded so that it does; words where a limit so far off limits nothing."""
    if check.passing_limit is None:
        return ""
    if check.kind != "max_regression" and bounds_nothing(check.passing_limit, check.value, check.limit):
        return "no limit near"
    if check.kind == "max_regression" and check.passing_limit <= 0:
        return "any"
    return write_number(round_outwards(check.passing_limit, is_up=check.kind != "min"))
