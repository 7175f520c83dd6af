"""What `doctor` found."""

from typing import Any

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.summary import Record


class Import(Record):
    """Whether a package imports in this environment; `problem` is the last line of what it raised."""

    package: str
    ok: bool
    problem: str = ""


class Examination(Record):
    versions: dict[str, str]
    hardware: dict[str, Any]
    imports: list[Import]
    conflicts: list[str]
    remarks: list[str]
    effective_settings: dict[str, dict[str, Any]] = {}

    @property
    def exit_code(self) -> ExitCode:
        healthy = not self.conflicts and all(import_.ok for import_ in self.imports)
        return ExitCode.PASS if healthy else ExitCode.ENVIRONMENT
