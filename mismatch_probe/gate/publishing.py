"""The answer as CI systems read it: JUnit, Markdown, GitHub annotations."""

import os
from pathlib import Path
from typing import Final

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from mismatch_probe.inert import plain
from mismatch_probe.notation import write_many
from mismatch_probe.records.answers import CheckResult, GateResult
from mismatch_probe.records.files import storage_errors, write_bytes
from mismatch_probe.report.answers.gate import checks_table, limit_text, no_baseline, pair_label
from mismatch_probe.report.markdown import escape, escaped_cell, markdown_table
from mismatch_probe.report.view import Badge, Cell

SUITE = "mismatch-probe gate"


def write_junit(path: Path, result: GateResult) -> None:
    """Write the result as JUnit XML."""
    suite = TestSuite(SUITE)
    suite.add_property("run", plain(result.run))
    suite.add_property("model", plain(result.model or "unknown"))
    for check in result.checks:
        suite.add_testcase(_junit_case(check, result.exit_code == 0))
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


def _junit_case(check: CheckResult, gate_passed: bool) -> TestCase:
    case = TestCase(plain(limit_text(check)), plain(f"{SUITE}.{check.pair}"))
    sentence = case.system_out = plain(check.sentence)
    if check.level == "error":
        if check.answer == "fail":
            case.result = [Failure(sentence, "limit broken")]
        elif check.answer == "inconclusive" and not gate_passed:
            case.result = [Error(sentence, "inconclusive")]
    return case


_MARKS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "error": "⛔"}
_WARNED = "⚠️"


def render_markdown(result: GateResult) -> str:
    """The Markdown of a result: a heading, the sentence, a row for each check, and the basis of the answer."""
    lines = [f"### {_MARKS[result.answer]} mismatch-probe gate: {result.answer}", "", escape(result.sentence), ""]
    if result.next_command is not None:
        lines += [escape(result.next_command), ""]
    if result.checks:
        lines += [*markdown_table(checks_table(result.checks), _markdown_mark), ""]
    lines += [f"- {_WARNED} {escape(sentence)}" for sentence in no_baseline(result)]
    lines += [f"- {escape(note)}" for note in (*_basis_lines(result), *result.notes)]
    sources = dict.fromkeys(check.source for check in result.checks if check.source)
    lines += [f"- source of limits: {escape(source)}" for source in sources]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_mark(cell: Cell) -> str:
    return _MARKS.get(cell.words, _WARNED) if isinstance(cell, Badge) else escaped_cell(cell)


def _basis_lines(result: GateResult) -> list[str]:
    is_file = not result.gate_file.startswith("preset ")
    lines = [f"run {result.run}, {'gate file ' if is_file else ''}{result.gate_file}"]
    if result.model is not None:
        lines.append(f"model {result.model}, fingerprint {result.model_fingerprint or 'not known'}")
    if result.baseline is not None:
        lines.append(f"baseline {result.baseline}")
    look = result.look
    if look is not None and result.alpha is not None:
        if look.num_prompts is not None:
            requirement = f"a pass needs {look.min_prompts} prompts"
            size = f"{write_many(look.num_sequences, 'sequence')} of {write_many(look.num_prompts, 'prompt')}"
            lines.append(f"{size}; {requirement}")
        lines.append(
            f"look {look.number} of {len(look.declared)} (at {', '.join(map(str, look.declared))} sequences): "
            f"{look.spent:.3f} of alpha {result.alpha:g} spent, one-sided bounds at {look.nominal_level:.4f}"
        )
    return lines


SUMMARY: Final = "GITHUB_STEP_SUMMARY"
OUTPUT: Final = "GITHUB_OUTPUT"


def is_job() -> bool:
    """Whether this process runs in a step of a GitHub job."""
    return bool(os.environ.get(SUMMARY))


def job_files() -> dict[str, Path]:
    """The files that the environment variables of the job name."""
    return {name: Path(path) for name in (SUMMARY, OUTPUT) if (path := os.environ.get(name))}


def write_to_job(result: GateResult) -> None:
    """Append the result to the job's summary and to the step's outputs."""
    texts = _job_texts(result)
    for variable, path in job_files().items():
        with storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(texts[variable])


def preview(result: GateResult) -> str:
    """What a GitHub job would receive, to show where none runs."""
    parts = [f"{variable}:\n{text}" for variable, text in _job_texts(result).items()]
    return "\n".join(["Not in a GitHub job, which would get this.\n", *parts, "Annotations:", *annotations(result)])


def annotations(result: GateResult) -> list[str]:
    """Workflow commands, which the runner reads from the job's output."""
    if result.answer == "error":
        return [_workflow_command("error", "gate: nothing was decided", result.sentence)]
    return [
        *(_workflow_command("warning", "gate: no baseline", f"not judged: {left_out}") for left_out in result.left_out),
        *(
            _workflow_command(
                _annotation_severity(check, result), f"gate: {limit_text(check)} ({pair_label(check)})", check.sentence
            )
            for check in result.checks
            if check.answer != "pass"
        ),
    ]


def _job_texts(result: GateResult) -> dict[str, str]:
    """The text for the file of each variable."""
    outputs = {"answer": result.answer, "exit-code": int(result.exit_code)}
    return {
        SUMMARY: render_markdown(result) + "\n",
        OUTPUT: "".join(f"{name}={value}\n" for name, value in outputs.items()),
    }


def _annotation_severity(check: CheckResult, result: GateResult) -> str:
    if check.level == "warn" or (check.answer == "inconclusive" and result.exit_code == 0):
        return "warning"
    return "error"


def _workflow_command(severity: str, title: str, message: str) -> str:
    title_text = plain(title).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{severity} title={title_text}::{plain(message).replace('%', '%25')}"
