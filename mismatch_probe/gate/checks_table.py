"""The checks of a result as one table: what was asked, what was measured, and the limit that would pass."""

from typing import Final

from mismatch_probe.gate.result import CheckResult
from mismatch_probe.gate.wording import change_text, rounded_out
from mismatch_probe.notation import write_number
from mismatch_probe.report.view import Badge, Cell, Table

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
    return Table("Checks", columns, rows)


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
