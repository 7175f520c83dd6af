"""Judging a run, and where the answer goes: the screen, the run directory, files that flags name, a GitHub job."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from mismatch_probe.cli.output import narration, print_json, require_no_run_file, results
from mismatch_probe.errors import BrokenRecord, MismatchProbeError, UsageError
from mismatch_probe.gate.console import render_gate, write_junit
from mismatch_probe.gate.markdown import annotations, is_job, job_files, preview, render_markdown, write_to_job
from mismatch_probe.gate.run import refused, run_gate
from mismatch_probe.inert import command_line
from mismatch_probe.reading import is_there
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.gate_result import GATE_FILE, JUNIT_FILE, GateResult, answer_of
from mismatch_probe.records.kinds import COMPARISONS, kind_of
from mismatch_probe.records.manifest import write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import write_report

_UNANSWERED: Final = "the gate began to judge this run and was ended before it had an answer; judge it again"


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes besides `RUN/gate.json` and `RUN/junit.xml`; shown: on the screen, at once."""

    shown: bool = True
    junit: Path | None = None
    markdown: Path | None = None
    github: bool = False
    json: bool = False


def judge_run(
    run: Path, gate_file: Path, baseline: Path | None, outputs: Outputs, *, without_baseline: bool = False
) -> GateResult:
    """Judge a run and publish the answer; an error is published too, then raised. No older answer stands meanwhile:
    first every file says that there is none. Arguments as those of `run_gate`.

    Raises:
        MismatchProbeError: nothing could be decided.
    """
    _require_replaceable(run, outputs, gate_file)
    earlier = answer_of(run)
    _write_files(refused(MismatchProbeError(_UNANSWERED), run, gate_file), outputs)
    try:
        result = run_gate(run, gate_file, baseline, earlier, without_baseline=without_baseline)
    except MismatchProbeError as error:
        publish(refused(error, run, gate_file), outputs)
        _update_page(run)
        raise
    publish(result, outputs)
    _update_page(run)
    return result


def _update_page(run: Path) -> None:
    """The answer stands on the page of the run, where it has one; that it could not be drawn is said."""
    directory = RunDirectory(run)
    if not _keeps_answers(run) or not (directory.report_path.exists() and directory.summary_path.exists()):
        return
    try:
        write_report(directory)
    except Exception as error:  # noqa: BLE001 - the page was not asked for, and the answer stands whatever it lacks
        narration().print(_page_is_old(run, error), soft_wrap=True)


def _page_is_old(run: Path, error: Exception) -> str:
    """That the answer is not on the page, and why."""
    why = str(error) if isinstance(error, MismatchProbeError) else f"{type(error).__name__}: {error}"
    page, again = RunDirectory(run).report_path, command_line("report", run)
    return f"The answer stands, but {page} could not be drawn with it: {why}; draw it again with `{again}`"


def _require_replaceable(run: Path, outputs: Outputs, gate_file: Path) -> None:
    """
    Raises:
        UsageError: a file that is asked for would take the place of the gate file, of a run's file, of another one, or
            of what is none.
    """
    taken = {gate_file.resolve(): "--config"}
    for flag, path in (("--junit", outputs.junit), ("--markdown", outputs.markdown)):
        if path is None:
            continue
        if is_there(path) and not path.is_file():
            raise UsageError(f"{flag} {path} is no file that could be replaced; give the path of a file")
        require_no_run_file(flag, path, own=run / JUNIT_FILE if flag == "--junit" else None)
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{flag} {path} is the file that {other} names; give another path")
    if outputs.github:
        for variable, path in job_files().items():
            require_no_run_file(variable, path)


def show_gate(result: GateResult, *, as_json: bool) -> None:
    """The answer as people read it, and as a document where that is asked for.

    Raises:
        StorageError: standard output does not take it.
    """
    render_gate(result, results(as_json=as_json))
    if as_json:
        print_json(result)


def publish(result: GateResult, outputs: Outputs) -> None:
    """Write the answer everywhere it was asked for."""
    _write_files(result, outputs)
    if outputs.github and is_job():
        write_to_job(result)
        for command in annotations(result):
            typer.echo(command, err=True)
    if outputs.shown:
        show_gate(result, as_json=outputs.json)
    if outputs.github and not is_job():
        typer.echo(f"\n{preview(result)}", err=outputs.json)


def _write_files(result: GateResult, outputs: Outputs) -> None:
    """Each takes the place of an older one when it is whole."""
    for path, write in _files(Path(result.run), outputs).items():
        write(path, result)


def _files(run: Path, outputs: Outputs) -> dict[Path, Callable[[Path, GateResult], None]]:
    """The files of an answer and what writes each; those of the run directory only where it is one to be judged."""
    files: dict[Path, Callable[[Path, GateResult], None]] = {}
    if _keeps_answers(run):
        files |= {run / GATE_FILE: _write_json, run / JUNIT_FILE: write_junit}
    if outputs.junit:
        files[outputs.junit] = write_junit
    if outputs.markdown:
        files[outputs.markdown] = _write_markdown
    return files


def _keeps_answers(run: Path) -> bool:
    """Whether a run of the kind that a gate judges is there, one with a damaged manifest among them."""
    try:
        return kind_of(run) in COMPARISONS
    except BrokenRecord:
        return RunDirectory(run).is_run


def _write_json(path: Path, result: GateResult) -> None:
    write_document(path, result)


def _write_markdown(path: Path, result: GateResult) -> None:
    write_text(path, render_markdown(result))
