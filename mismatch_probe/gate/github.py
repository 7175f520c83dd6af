"""GitHub Actions: a job summary, and an annotation for each check that is not kept."""

import os
from pathlib import Path

from mismatch_probe.errors import UsageError
from mismatch_probe.gate.checks_table import limit_text
from mismatch_probe.gate.markdown import render_markdown
from mismatch_probe.gate.result import CheckResult, GateResult
from mismatch_probe.inert import plain
from mismatch_probe.records.atomic import storage_errors

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def summary_path() -> Path:
    """Where the job summary goes.

    Raises:
        UsageError: this is no GitHub job.
    """
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        raise UsageError(
            f"--github writes to the file that {SUMMARY_VARIABLE} names, and it is not set; use --markdown"
        )
    return Path(path)


def append_summary(path: Path, result: GateResult) -> None:
    """Add the result to the job summary, which other steps write to as well.

    Raises:
        StorageError: the disk refused.
    """
    with storage_errors(path), path.open("a", encoding="utf-8") as summary:
        summary.write(render_markdown(result) + "\n")


def annotations(result: GateResult) -> list[str]:
    """Workflow commands; the runner reads them from the job's output."""
    if result.answer == "error":
        return [_command("error", "gate: nothing was decided", result.sentence)]
    return [
        _command(_severity(check, result), f"gate: {limit_text(check)} ({check.pair})", check.sentence)
        for check in result.checks
        if check.answer != "pass"
    ]


def _severity(check: CheckResult, result: GateResult) -> str:
    if check.level == "warn" or (check.answer == "inconclusive" and result.exit_code == 0):
        return "warning"
    return "error"


def _command(severity: str, title: str, message: str) -> str:
    escaped = plain(title).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{severity} title={escaped}::{plain(message).replace('%', '%25')}"
