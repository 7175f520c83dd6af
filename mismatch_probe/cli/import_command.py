"""What `import` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from mismatch_probe.cli.log_output import show_run, with_dtypes
from mismatch_probe.cli.output import narration, results
from mismatch_probe.cli.progress_line import ProgressLine, progress_line, time_left
from mismatch_probe.command_line import command_line
from mismatch_probe.errors import ExitCode, MismatchProbeError, RunDirectoryError
from mismatch_probe.importing.prompts import write_prompts
from mismatch_probe.importing.run import Log, LogSettings, import_log
from mismatch_probe.logs import Format, LogFinding, Source, recognise
from mismatch_probe.notation import write_count, write_many
from mismatch_probe.records.kinds import Kind, kind_of
from mismatch_probe.records.manifest import LogFile
from mismatch_probe.records.run_directory import RunDirectory

_SAID_EVERY: Final = 64


def run_import(
    source: Path, out: Path, format_name: str | None, given: Mapping[str, Any], *, json_output: bool
) -> ExitCode:
    """Read the log, make the run directory, and show what it says where both sides are recorded.

    Raises:
        MismatchProbeError: the log cannot be used, as one sentence.
    """
    console = narration()
    settings = LogSettings(**with_dtypes(given))
    directory = RunDirectory(out)
    if directory.is_run:
        is_unfinished = kind_of(out) == Kind.IMPORTED and not directory.summary_path.exists()
        how = f", or finish the one there: {directory.how_to_finish()}" if is_unfinished else ""
        raise RunDirectoryError(f"{out} already holds a run, and an import begins anew: give another --out{how}")
    directory.require_free()
    known = recognise(source, format_name)
    console.print(f"Format: {known.title}", soft_wrap=True)
    if known.prompts is not None:
        return _import_prompts(known, source, out, results(as_json=json_output))
    try:
        with progress_line(console) as line:
            count = _Count(line, known.sources(source))
            run = import_log(_log(known, source, count), settings, out, count.add, count.end)
    except (KeyboardInterrupt, MismatchProbeError):
        if RunDirectory(out).is_run:
            go_on = command_line("report", out, "--recompute")
            console.print(f"What was imported is kept. Continue with: {go_on}", soft_wrap=True)
        raise
    console = results(as_json=json_output)
    manifest = run.read_manifest()
    origin = manifest.log
    assert origin is not None
    console.print(
        f"{write_many(origin.num_responses, 'response')} of {write_many(origin.num_tokens, 'token')}, "
        f"{write_count(origin.num_sampled_tokens)} sampled by the policy; analysed: "
        f"{write_many(origin.analysed_responses, 'response')}, {write_many(origin.analysed_tokens, 'token')}",
        soft_wrap=True,
    )
    for note in origin.notes:
        console.print(f"{note.level}: {note.sentence}", soft_wrap=True)
    for name, what in origin.assumed.items():
        console.print(f"assumed: {name.replace('_', ' ')} {what}", soft_wrap=True)
    if not run.summary_path.exists():
        console.print(
            "The log has no log-probs of the trainer, so there is nothing to compare yet. Compute them: mismatch-probe "
            f"score {run.path} --model CHECKPOINT --out SCORED",
            soft_wrap=True,
        )
        return ExitCode.INCONCLUSIVE
    return show_run(run, json_output=json_output)


def _import_prompts(known: Format, source: Path, out: Path, console: Console) -> ExitCode:
    """What a log of texts is good for."""
    findings: list[LogFinding] = []
    path, count = write_prompts(known, source, out, findings)
    for finding in findings:
        console.print(f"{finding.level}: {finding.sentence}", soft_wrap=True)
    console.print(
        f"Nothing of it can be compared: {known.why_not}. "
        f"Its {write_many(count, 'prompt')} {'is' if count == 1 else 'are'} in {path}; ask "
        f"again: mismatch-probe compare --model CHECKPOINT --prompts {path}",
        soft_wrap=True,
    )
    return ExitCode.INCONCLUSIVE


def _log(known: Format, source: Path, count: "_Count") -> Log:
    findings: list[LogFinding] = []
    return Log(
        source=str(source),
        format=known.name,
        files=[_file(file) for file in count.files],
        responses=known.read(source, findings.append, count.begin_file),
        told=lambda: findings,
    )


def _file(source: Source) -> LogFile:
    modified = datetime.fromtimestamp(source.modified, UTC).isoformat(timespec="seconds")
    return LogFile(
        path=str(source.path),
        size_bytes=source.num_bytes,
        modified_at=modified,
        step=source.step,
        complete=source.complete,
    )


class _Count:
    """How many files, responses and tokens were read, for the line, and how long the other files will take.

    A file is foretold by the seconds that the files before it took a byte.
    """

    def __init__(self, line: ProgressLine, files: Sequence[Source]) -> None:
        self.files = files
        self._line = line
        self._num_bytes = sum(file.num_bytes for file in files)
        self._responses = self._tokens = self._files_begun = self._bytes_begun = 0
        self._began = time.monotonic()
        self._seconds = 0.0
        """Foretold, of all files; 0 until one was read."""
        line.begin("reading the log")

    def begin_file(self) -> None:
        if self._bytes_begun:
            self._seconds = (time.monotonic() - self._began) / self._bytes_begun * self._num_bytes
        self._bytes_begun += self.files[self._files_begun].num_bytes
        self._files_begun += 1

    def add(self, num_tokens: int) -> None:
        self._responses += 1
        self._tokens += num_tokens
        if self._responses % _SAID_EVERY == 0:
            self._line.go_on(", ".join(self._how_far()))

    def _how_far(self) -> Iterator[str]:
        if len(self.files) > 1:
            yield f"file {write_count(self._files_begun)} of {write_count(len(self.files))}"
        if self._seconds:
            yield time_left(max(self._seconds - (time.monotonic() - self._began), 0))
        yield write_many(self._responses, "response")
        yield write_many(self._tokens, "token")

    def end(self) -> None:
        self._line.begin("statistics and verdict")
