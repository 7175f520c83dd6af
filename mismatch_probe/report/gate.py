"""What a gate said of a run: its checks as one table, and a section of the page of the run that it judged."""

import math
from pathlib import Path
from typing import Final

from mismatch_probe.notation import write_many, write_number
from mismatch_probe.records.gate_result import CheckResult, GateResult
from mismatch_probe.report.view import Badge, Block, Cell, Command, Finding, Note, Section, Table

_DIGITS: Final = 3
_HEADINGS: Final = {"fail": "Broken", "inconclusive": "Undecided"}
_KINDS: Final = {"pass": "clean", "fail": "bug", "inconclusive": "undecided", "error": "broken"}


def checks_table(checks: list[CheckResult]) -> Table:
    """One row a check; the badge of one that only warns says so."""
    columns = ["answer", "pair", "limit", "value", "bounds", "would pass at"]
    rows: list[list[Cell]] = [
        [
            Badge(_KINDS[check.answer], _answer(check)),
            check.pair,
            limit_text(check),
            _value_text(check),
            _bounds_text(check),
            passing_text(check),
        ]
        for check in checks
    ]
    return Table("Checks", columns, rows, text_columns=frozenset({1, 2}), stacked=True)


def gate_section(result: GateResult) -> Section:
    """The answer, every check, and what it rests on."""
    told = {answer: [check.sentence for check in result.checks if check.answer == answer] for answer in _HEADINGS}
    lists = [(_HEADINGS[answer], sentences) for answer, sentences in told.items() if sentences]
    blocks: list[Block] = [Finding("gate-answer", "Gate", gate_badge(result), result.sentence, lists)]
    if result.next_command is not None:
        blocks.append(Command(result.next_command))
    if result.checks:
        blocks.append(checks_table(result.checks))
    if result.notes:
        blocks.append(Note("What the gate could not check, or left out:", result.notes))
    return Section("gate", "What the gate said", f"Judged by {result.gate_file}{_rests_on(result)}.", blocks)


def gate_badge(result: GateResult) -> Badge:
    return Badge(_KINDS[result.answer], f"gate: {result.answer}")


def gate_fact(result: GateResult) -> str:
    """For the top of the page."""
    return f"gate {Path(result.gate_file).name}: {result.answer}"


def _rests_on(result: GateResult) -> str:
    look = result.look
    against = "" if result.baseline is None else f" against {result.baseline}"
    return against if look is None else f"{against}, on {write_many(look.num_sequences, 'response')}"


def _answer(check: CheckResult) -> str:
    return f"warn ({check.answer})" if check.level == "warn" and check.answer != "pass" else check.answer


def limit_text(check: CheckResult) -> str:
    return f"{check.measured} {check.kind} {check.limit:g}"


def _value_text(check: CheckResult) -> str:
    """The metric; with a baseline also how much worse it is."""
    if check.baseline_value is None:
        return write_number(check.value)
    return f"{write_number(check.run_value)} ({change_text(check.value)}, {check.comparison})"


def _bounds_text(check: CheckResult) -> str:
    if check.low is None or check.high is None:
        return "none"
    if check.kind == "max_regression":
        return f"{check.low:+.1%} to {check.high:+.1%}"
    return f"{write_number(check.low)} to {write_number(check.high)}"


def passing_text(check: CheckResult) -> str:
    """The tightest limit that would pass, rounded so that it does."""
    if check.passing_limit is None:
        return ""
    if check.kind == "max_regression" and check.passing_limit <= 0:
        return "any"
    return write_number(rounded_out(check.passing_limit, up=check.kind != "min"))


def change_text(worse: float) -> str:
    """`12.3% worse`, `4.0% better`."""
    return f"{abs(worse):.1%} {'better' if worse < 0 else 'worse'}"


def rounded_out(value: float, *, up: bool) -> float:
    """`value` to three digits, rounded to the side on which a limit still passes."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - _DIGITS + 1)
    return float(f"{(math.ceil if up else math.floor)(value / unit) * unit:.{_DIGITS}g}")
