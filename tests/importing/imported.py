"""A log that is imported by the command."""

from pathlib import Path

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from tests.command_line import probe


def imported(tmp_path: Path, log: Path, *words: object, code: ExitCode = ExitCode.PASS) -> RunDirectory:
    probe("import", log, "--out", tmp_path / "run", *words, code=code)
    return RunDirectory(tmp_path / "run")


def pair_of(run: RunDirectory) -> PairSummary:
    (pair,) = run.read_summary().pairs
    return pair
