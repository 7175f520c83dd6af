"""Judging a run, once or at each declared look, and where the answer goes: screen, run directory, files, a CI job."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from rich.console import Console

from mismatch_probe.cli.output import narration, print_json, require_no_run_file, results
from mismatch_probe.cli.progress import progress_listener
from mismatch_probe.compare.cost.forecast import run_clock
from mismatch_probe.compare.derived_runs import extend_run
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.errors import BrokenRecord, MismatchProbeError, UsageError
from mismatch_probe.gate.config import GateFile, GateSource
from mismatch_probe.gate.publishing import (
    annotations,
    is_job,
    job_files,
    preview,
    render_markdown,
    write_junit,
    write_to_job,
)
from mismatch_probe.gate.run import open_gate, refusal, run_gate
from mismatch_probe.inert import command_line
from mismatch_probe.reading import is_there
from mismatch_probe.records.answers import GATE_FILE, JUNIT_FILE, GateResult, Look, answer_of
from mismatch_probe.records.files import COMPARISONS, kind_of, write_text
from mismatch_probe.records.findings import Findings, file_name
from mismatch_probe.records.manifest import write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.answers.gate import gate_answer
from mismatch_probe.report.page import write_report
from mismatch_probe.report.screen import print_answer, print_line
from mismatch_probe.tasks import num_held

_UNANSWERED: Final = "the gate began to judge this run and was ended before it had an answer; judge it again"


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes besides `RUN/gate.json` and `RUN/junit.xml`; is_shown: whether it is printed at once."""

    is_shown: bool = True
    junit: Path | None = None
    markdown: Path | None = None
    github: bool = False
    json: bool = False


def judge_run(
    run: Path, gate_file: GateSource, baseline: Path | None, outputs: Outputs, *, without_baseline: bool = False
) -> GateResult:
    """Judge a run and publish the answer; an error is published too, then raised. No older answer stands meanwhile:
    first every file says that there is none. Arguments as those of `run_gate`.

    Raises:
        MismatchProbeError: nothing could be decided.
    """
    _require_replaceable(run, outputs, gate_file)
    earlier = answer_of(run)
    _write_files(refusal(MismatchProbeError(_UNANSWERED), run, gate_file), outputs)
    try:
        result = run_gate(run, gate_file, baseline, earlier, without_baseline=without_baseline, count_prompts=num_held)
    except MismatchProbeError as error:
        publish(refusal(error, run, gate_file), outputs)
        _update_page(run)
        raise
    publish(result, outputs)
    _update_page(run)
    return result


def _update_page(run: Path) -> None:
    """Draw the page of the run again, where it has one, with the answer; print why where that fails."""
    directory = RunDirectory(run)
    if not _keeps_answers(run) or not (directory.report_path.exists() and directory.summary_path.exists()):
        return
    try:
        write_report(directory)
    except Exception as error:  # noqa: BLE001 - the page was not asked for, and the answer stands whatever it lacks
        print_line(narration(), _page_is_old(run, error))


def _page_is_old(run: Path, error: Exception) -> str:
    """That the answer is not on the page, and why."""
    why = str(error) if isinstance(error, MismatchProbeError) else f"{type(error).__name__}: {error}"
    page, command = RunDirectory(run).report_path, command_line("report", run)
    return f"The answer stands, but {page} could not be drawn with it: {why}; draw it again with `{command}`"


def _require_replaceable(run: Path, outputs: Outputs, gate_file: GateSource) -> None:
    """
    Raises:
        UsageError: a file that is asked for would take the place of the gate file, of a run's file, of another one, or
            of what is none.
    """
    files_in_use = {gate_file.resolve(): "--config"} if isinstance(gate_file, Path) else {}
    for flag, path in (("--junit", outputs.junit), ("--markdown", outputs.markdown)):
        if path is None:
            continue
        if is_there(path) and not path.is_file():
            raise UsageError(f"{flag} {path} is no file that could be replaced; give the path of a file")
        require_no_run_file(flag, path, own=run / JUNIT_FILE if flag == "--junit" else None)
        other = files_in_use.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{flag} {path} is the file that {other} names; give another path")
    if outputs.github:
        for variable, path in job_files().items():
            require_no_run_file(variable, path)


def show_gate(result: GateResult, *, as_json: bool) -> None:
    """The answer as people read it, and as a document where that is asked for. A refusal is raised later, and printed
    then.

    Raises:
        StorageError: standard output does not take it.
    """
    if result.answer != "error":
        print_answer(gate_answer(result), results(as_json=as_json))
    if as_json:
        print_json(result)


def publish(result: GateResult, outputs: Outputs) -> None:
    """Write the answer everywhere it was asked for."""
    _write_files(result, outputs)
    if outputs.github and is_job():
        write_to_job(result)
        for command in annotations(result):
            typer.echo(command, err=True)
    if outputs.is_shown:
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


@dataclass(frozen=True)
class GatedCompare:
    """The gate of a comparison; made before anything is sampled, so that a bad gate file costs nothing."""

    path: Path
    baseline: Path | None
    without_baseline: bool
    gate: GateFile

    @classmethod
    def open(cls, path: Path, baseline: Path | None, *, without_baseline: bool) -> "GatedCompare":
        """Read the gate file.

        Raises:
            UsageError: it cannot be used, or asks for a baseline that is not given.
        """
        gate = open_gate(path, baseline, "--gate", without_baseline=without_baseline)
        if gate.layout:
            raise UsageError(
                f"{path} compares the metrics of two trainings, and compare makes none: give them to "
                "`mismatch-probe gate METRICS --baseline METRICS`, and --gate limits on a run"
            )
        return cls(path, baseline, without_baseline, gate)

    @property
    def flags(self) -> list[object]:
        """Those that gave it."""
        baseline = ["--without-baseline"] if self.without_baseline else []
        return ["--gate", self.path, *(baseline if self.baseline is None else ["--baseline", self.baseline])]

    def settings_to_start(
        self, settings: CompareSettings, earlier_run: RunDirectory | None, console: Console
    ) -> CompareSettings:
        """`settings` with at least the prompts that the first look needs, or with those of the run that is continued:
        how many it has by now is the gate's doing, whatever the flags say.

        Raises:
            UsageError: the gate asks for what `compare` does not find, and it is not filed with the run yet; or the
                prompts are too few for its first look, or for a pass.
        """
        if self.gate.filed:
            self._require_filed(earlier_run)
        if earlier_run is None:
            looks = self.gate.settings.looks
            self._require_prompts(settings, looks[0])
            if missing := self._missing(settings, looks[-1]):
                print_line(console, f"The last look cannot be reached: {missing}")
            return self._with_sequences(settings, looks[0], console)
        return _with_prompts(settings, earlier_run.read_manifest().settings.prompts.num_prompts)

    def run(self, run: RunDirectory, console: Console, publish: Callable[[], object]) -> GateResult:
        """Judge; while it is inconclusive and another look is declared, add prompts, `publish`, and judge again.

        Raises:
            MismatchProbeError: nothing can be decided, or an extension failed; what was computed is kept.
        """
        while True:
            outputs = Outputs(is_shown=False)
            result = judge_run(run.path, self.path, self.baseline, outputs, without_baseline=self.without_baseline)
            settings = run.read_manifest().settings
            num_wanted = None if result.look is None else self._num_wanted(result.look, settings)
            if result.answer != "inconclusive" or self.gate.settings.on_inconclusive != "extend" or num_wanted is None:
                return result
            num_recorded = settings.prompts.num_prompts or 0
            try:
                self._require_prompts(settings, num_wanted)
                settings = self._with_sequences(settings, num_wanted, console)
                preparation = prepare(settings)
            except UsageError as error:
                print_line(console, f"The run cannot be extended: {error}")
                return result
            console.print("The gate is inconclusive so far, so the run is extended")
            clock = run_clock(preparation, run, first_prompt=num_recorded)
            with progress_listener(console, run, clock) as listener:
                extend_run(run, preparation, listener)
            publish()

    def _num_wanted(self, look: Look, settings: CompareSettings) -> int | None:
        """Sequences of the next look; after the last, what there is where a pass needs more prompts than were given."""
        if look.next_sequences is None and (settings.prompts.num_prompts or 0) < self.gate.settings.min_prompts:
            return look.num_sequences
        return look.next_sequences

    def _require_filed(self, earlier_run: RunDirectory | None) -> None:
        filed_checks = {check.metric.partition("_")[0]: check for check in self.gate.filed}
        documents = Findings(earlier_run.path).documents() if earlier_run is not None else []
        commands_filed = {file_name(document).partition(".")[0].partition("-")[0] for document in documents}
        for command, check in filed_checks.items():
            if command not in commands_filed:
                raise UsageError(
                    f"{self.path} asks for {check}, which {command} finds and compare does not: take the check out, "
                    f"or give {command} the finished run (--run) and judge that with `mismatch-probe gate`"
                )

    def _with_sequences(self, settings: CompareSettings, num_wanted: int, console: Console) -> CompareSettings:
        num_prompts = settings.prompts.num_prompts
        num_needed = self._num_prompts_needed(settings, num_wanted)
        if num_prompts is not None and num_needed <= num_prompts:
            return settings
        instead = "" if num_prompts is None else f" instead of {num_prompts}"
        what = f"looks at {num_wanted} sequences and passes from {self.gate.settings.min_prompts} prompts on"
        print_line(console, f"The gate {what}: {num_needed} prompts{instead}")
        return _with_prompts(settings, num_needed)

    def _num_prompts_needed(self, settings: CompareSettings, num_sequences: int) -> int:
        return self.gate.settings.prompts_for(num_sequences, settings.sampling.samples_per_prompt)

    def _require_prompts(self, settings: CompareSettings, num_wanted: int) -> None:
        """
        Raises:
            UsageError: the source holds fewer prompts than a look at so many sequences takes.
        """
        missing = self._missing(settings, num_wanted)
        if missing:
            raise UsageError(missing)

    def _missing(self, settings: CompareSettings, num_wanted: int) -> str:
        """What a look at so many sequences lacks and how it is fixed; empty where it lacks nothing."""
        source, least = settings.prompts.source, self.gate.settings.min_prompts
        num_needed = self._num_prompts_needed(settings, num_wanted)
        num_in_source = num_held(source, num_needed)
        if num_in_source is None or num_in_source >= num_needed:
            return ""
        if num_in_source < least:
            return (
                f"{source} holds {num_in_source} prompts, and a pass of {self.path} needs {least}, however many "
                "responses they have; give --prompts a source of more, or lower min_prompts and be wrong more often"
            )
        num_sequences, enough = (
            num_in_source * settings.sampling.samples_per_prompt,
            math.ceil(num_wanted / num_in_source),
        )
        return (
            f"{self.path} looks at {num_wanted} sequences, and the {num_in_source} prompts of {source} give "
            f"{num_sequences}; start with --samples-per-prompt {enough}, or give --prompts a source of more"
        )


def _with_prompts(settings: CompareSettings, num_prompts: int | None) -> CompareSettings:
    return settings.model_copy(update={"prompts": settings.prompts.model_copy(update={"num_prompts": num_prompts})})
