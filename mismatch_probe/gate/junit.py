"""`junit.xml`: one test case a check; what was not decided is an error, so that no test reporter shows it green."""

from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from mismatch_probe.inert import plain
from mismatch_probe.records.atomic import write_bytes
from mismatch_probe.records.gate_result import CheckResult, GateResult

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
