"""The result as a person and as a CI system read it: one screen, and `junit.xml`."""

from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from rich.console import Console

from mismatch_probe.gate.reading import Floor
from mismatch_probe.gate.wording import no_baseline
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_number
from mismatch_probe.records.atomic import write_bytes
from mismatch_probe.records.gate_result import CheckResult, GateResult
from mismatch_probe.report.gate import checks_table
from mismatch_probe.report.screen import print_command, print_line, print_table
from mismatch_probe.report.view import Table

_BEGIN = {"fail": "broken", "inconclusive": "undecided"}
"""What the sentence of a blocking check that is not kept begins with."""
_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "error": "bold magenta"}


def render_gate(result: GateResult, console: Console) -> None:
    """One row a check, a sentence for each that is not kept, and the answer last, where the eye stops.

    A command to go on stands in a line of its own.
    """
    if result.checks:
        print_table(console, checks_table(result.checks))
    for line in (*_sentences(result), *no_baseline(result), *result.notes):
        print_line(console, line)
    if result.answer != "error":
        print_line(console, result.sentence, _STYLES[result.answer])
    if result.next_command is not None:
        print_command(console, result.next_command)


def render_floor(floor: Floor, console: Console) -> None:
    """What calibration found."""
    rows = [
        [row.pair, row.measured, write_number(row.same_leg), "n/a" if row.change is None else f"{row.change:.2%}"]
        for row in floor.entries
    ]
    print_table(console, Table("Floor", ["pair", "measured", "same leg twice", "change between runs"], rows))


def _sentences(result: GateResult) -> list[str]:
    return [f"{_begin(check)}: {check.sentence}" for check in result.checks if check.answer != "pass"]


def _begin(check: CheckResult) -> str:
    return "warning" if check.level == "warn" else _BEGIN[check.answer]


SUITE = "mismatch-probe gate"


def write_junit(path: Path, result: GateResult) -> None:
    """Write the result as JUnit XML.

    Raises:
        StorageError: the disk refused.
    """
    suite = TestSuite(SUITE)
    suite.add_property("run", plain(result.run))
    suite.add_property("model", plain(result.model or "unknown"))
    for check in result.checks:
        suite.add_testcase(_case(check, result.exit_code == 0))
    for left_out in result.left_out:
        case = TestCase(plain(left_out), SUITE)
        case.result = [Skipped("no baseline yet")]
        suite.add_testcase(case)
    if result.answer == "error":
        case = TestCase("the gate could be decided", SUITE)
        case.result = [Error(plain(result.sentence), "error")]
        suite.add_testcase(case)
    document = JUnitXml(SUITE)
    document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]
    write_bytes(path, document.tostring())  # type: ignore[no-untyped-call]


def _case(check: CheckResult, gate_passed: bool) -> TestCase:
    case = TestCase(plain(f"{check.measured} {check.kind} {check.limit:g}"), plain(f"{SUITE}.{check.pair}"))
    sentence = case.system_out = plain(check.sentence)
    if check.level == "error":
        if check.answer == "fail":
            case.result = [Failure(sentence, "limit broken")]
        elif check.answer == "inconclusive" and not gate_passed:
            case.result = [Error(sentence, "inconclusive")]
    return case
