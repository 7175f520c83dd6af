"""GitHub Actions: a job summary, the outputs of the step, and an annotation for each check that is not kept."""

import os
from pathlib import Path
from typing import Final

from mismatch_probe.gate.markdown import render_markdown
from mismatch_probe.inert import plain
from mismatch_probe.records.atomic import storage_errors
from mismatch_probe.records.gate_result import CheckResult, GateResult
from mismatch_probe.report.gate import limit_text

SUMMARY: Final = "GITHUB_STEP_SUMMARY"
OUTPUT: Final = "GITHUB_OUTPUT"


def is_job() -> bool:
    """Whether a step of a job runs here."""
    return bool(os.environ.get(SUMMARY))


def job_files() -> dict[str, Path]:
    """The files that the job names, by their variables."""
    return {name: Path(path) for name in (SUMMARY, OUTPUT) if (path := os.environ.get(name))}


def write_to_job(result: GateResult) -> None:
    """Add the result to the job's summary and to the step's outputs, which others write to as well.

    Raises:
        StorageError: the disk refused.
    """
    texts = _texts(result)
    for variable, path in job_files().items():
        with storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(texts[variable])


def preview(result: GateResult) -> str:
    """What a job would get, for where none runs."""
    parts = [f"{variable}:\n{text}" for variable, text in _texts(result).items()]
    return "\n".join(["Not in a GitHub job, which would get this.\n", *parts, "Annotations:", *annotations(result)])


def annotations(result: GateResult) -> list[str]:
    """Workflow commands; the runner reads them from the job's output."""
    if result.answer == "error":
        return [_command("error", "gate: nothing was decided", result.sentence)]
    return [
        *(_command("warning", "gate: no baseline", f"not judged: {left_out}") for left_out in result.left_out),
        *(
            _command(_severity(check, result), f"gate: {limit_text(check)} ({check.pair})", check.sentence)
            for check in result.checks
            if check.answer != "pass"
        ),
    ]


def _texts(result: GateResult) -> dict[str, str]:
    """What each variable's file gets."""
    outputs = {"answer": result.answer, "exit-code": int(result.exit_code)}
    return {
        SUMMARY: render_markdown(result) + "\n",
        OUTPUT: "".join(f"{name}={value}\n" for name, value in outputs.items()),
    }


def _severity(check: CheckResult, result: GateResult) -> str:
    if check.level == "warn" or (check.answer == "inconclusive" and result.exit_code == 0):
        return "warning"
    return "error"


def _command(severity: str, title: str, message: str) -> str:
    escaped = plain(title).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{severity} title={escaped}::{plain(message).replace('%', '%25')}"
