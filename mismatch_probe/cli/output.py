"""What a command prints and writes: the result for people, one JSON document, files that flags name, and where an
examination files its document.

What is printed meanwhile is on stderr, and with --json the result that people read is too. Every command imports this
file, so what a few of them need is imported where it is used.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TextIO

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mismatch_probe.cli.process import for_people, output_is_open
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.resuming import code_flags, resumed_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import (
    BrokenRecord,
    ExitCode,
    MismatchProbeError,
    MissingExtra,
    RunDirectoryError,
    TrainingStopped,
    UsageError,
)
from mismatch_probe.inert import command_line, plain
from mismatch_probe.provenance import checkpoint
from mismatch_probe.reading import is_there
from mismatch_probe.records.examinations import Audit, Headroom
from mismatch_probe.records.files import kind_of, open_to_append, storage_errors
from mismatch_probe.records.findings import Findings, Localization, require_absent
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.screen import print_answer, print_command, print_line


class PeopleConsole(Console):
    """Where people read. Brackets in a path, a name or an error are text and no markup; what a stranger wrote is inert,
    whatever it comes in: a string is one line, and only rich itself moves the cursor.
    """

    def __init__(self, file: TextIO | None = None, *, stderr: bool = True) -> None:
        super().__init__(file=file, stderr=file is None and stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(plain(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n":
                yield segment
                continue
            for number, line in enumerate(segment.text.split("\n")):
                if number:
                    yield Segment.line()
                yield Segment(plain(line), segment.style)


def narration() -> Console:
    """A console on standard error, for what a command prints while it works."""
    return PeopleConsole()


def results(*, as_json: bool) -> Console:
    """A console for what was asked for: on stderr where the document has stdout for itself, or stdout is closed."""
    return PeopleConsole(stderr=as_json or not output_is_open())


def print_json(document: BaseModel) -> None:
    """The document in ASCII: what a terminal or a CI runner would act on is escaped, and reads back as it was.

    Raises:
        StorageError: standard output does not take it.
    """
    text = document.model_dump_json(indent=2, ensure_ascii=True).replace("##", "#\\u0023")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_outcome(console: Console, report: Path | None, document: BaseModel, *, as_json: bool) -> None:
    """Where the page is, if there is one, and the document where it is asked for.

    Raises:
        StorageError: standard output does not take it.
    """
    if report is not None:
        console.print(f"Report: {report}", soft_wrap=True)
    if as_json:
        print_json(document)


@contextmanager
def can_go_on(
    command: str,
    run: RunDirectory,
    settings: Mapping[str, Any],
    console: Console,
    *,
    is_new: bool,
    consequence: str = "What was computed is kept.",
    flags: Sequence[object] = (),
) -> Iterator[None]:
    """Where what computes `run` ends early, print the `consequence` and the command that goes on with its `settings`.

    flags: flags that no run records, to be given again.

    A new run that a wrong flag ended before its first result is removed instead, so that the same command can be given
    again, fixed.
    """
    try:
        yield
    except (RunDirectoryError, TrainingStopped):
        raise
    except (UsageError, MissingExtra):
        if is_new:
            run.discard_without_results()
        raise
    except (KeyboardInterrupt, MismatchProbeError):
        how = command_line(command, "--resume", "--out", run.path, *code_flags(settings), *flags)
        print_line(console, f"{consequence} Continue with:")
        print_command(console, how)
        raise


@contextmanager
def noise_in(log: Path) -> Iterator[Console]:
    """Send everything written to this process's stdout and stderr, C++ libraries included, to the end of `log`.

    Yields a console on the stderr there was before.

    Raises:
        StorageError: the log cannot be written.
    """
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(log) as file:
            target = os.dup(file.fileno())
    copies = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        _redirect(dict.fromkeys(copies, target))
        with for_people(os.dup(copies[2])) as people:
            yield PeopleConsole(people)
    finally:
        _redirect(copies)
        for descriptor in (target, *copies.values()):
            os.close(descriptor)


def _redirect(targets: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for stream, target in targets.items():
        os.dup2(target, stream)


_ENDINGS: Final = (".md", ".html", ".xml", ".txt", ".toml")
"""Endings of files that people keep in the folder of a run."""
_NAMES: Final = ("report.html", "junit.xml")
"""Of files of a run that end so."""
_SIGNS: Final = ("prompts.parquet", "rollouts.parquet", "legs", "parts", "metrics.jsonl", "checkpoints", "sanity.json")
"""What a run holds whose manifest cannot be read."""


def require_no_run_file(flag: str, path: Path, own: Path | None = None) -> None:
    """Found out before anything is computed, however the path is spelt. own: the file of a run that `flag` may name,
    because the command writes it in any case.

    In a run directory there is room at its top, for what has another name and another ending than the files of runs.

    Raises:
        UsageError: it is a file of a run, or would be one.
    """
    target = _resolve(path)
    if own is not None and target == _resolve(own):
        return
    for folder in target.parents:
        if not _is_run(folder):
            continue
        is_beside = folder == target.parent and target.suffix.lower() in _ENDINGS
        if not is_beside or target.name.lower() in _NAMES:
            raise UsageError(
                f"{flag} {path} is a place of the run's own files in {folder}, and these are never written over; give "
                "a path outside of it"
            )
        return


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links in a circle, which whoever writes there meets
        return path.absolute()


def _is_run(folder: Path) -> bool:
    try:
        return kind_of(folder) is not None
    except BrokenRecord:
        return any(is_there(folder / name) for name in _SIGNS)


def rescore_run(
    responses: RunDirectory, settings_of: RunDirectory, out: Path, *, trust_remote_code: bool
) -> RunDirectory:
    """A run at `out` of one run's responses with the other's settings, with its report.

    Raises:
        MismatchProbeError: it cannot be made; what was computed stays.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    from mismatch_probe.compare.derived_runs import open_rescoring
    from mismatch_probe.report.page import write_report

    console = narration()
    run = open_rescoring(out, responses, settings_of, trust_remote_code=trust_remote_code)
    rescore_with_progress(run, console)
    console.print(f"Report: {write_report(run)}", soft_wrap=True)
    return run


def rescore_with_progress(run: RunDirectory, console: Console) -> None:
    """Rescore, with its progress on the console.

    Raises:
        MismatchProbeError: it cannot be done; what was computed stays.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    from mismatch_probe.cli.progress import progress_listener
    from mismatch_probe.compare.cost.forecast import run_clock
    from mismatch_probe.compare.derived_runs import rescore
    from mismatch_probe.compare.preparation import Preparation
    from mismatch_probe.records.legs import read_prompts
    from mismatch_probe.records.tables import prompts_of

    try:
        manifest = run.read_manifest()
        prompts = prompts_of(read_prompts(run, manifest.run_key))
        clock = run_clock(Preparation(manifest, prompts), run)
        with progress_listener(console, run, clock) as listener:
            rescore(run, listener)
    except (KeyboardInterrupt, MismatchProbeError):
        print_line(console, "What was computed is kept. Continue with the same command")
        raise


def show_run(run: RunDirectory, *, json_output: bool) -> ExitCode:
    from mismatch_probe.report.page import answer_on_screen, full_summary, write_report

    path, summary, console = write_report(run), full_summary(run), results(as_json=json_output)
    print_answer(answer_on_screen(summary, run.path), console)
    print_outcome(console, path, summary, as_json=json_output)
    return summary.exit_code


def with_dtypes(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, dtypes parsed."""
    values = {name: value for name, value in flags.items() if value is not None}
    return {name: Dtype.parse(value) if name.endswith("_dtype") else value for name, value in values.items()}


_LONGEST_WAIT_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Filing:
    """A folder of its own (--out), the directory of a comparison (--run), whose manifest is then given, or neither."""

    folder: Path | None
    manifest: Manifest | None

    @classmethod
    def open(cls, out: Path | None, run: Path | None, flags: dict[str, Any]) -> Self:
        """Found out before anything is computed.

        Raises:
            UsageError: both are given, the folder is in use, or `flags` name another model than the run's.
            RunDirectoryError: there is no run.
        """
        if run is None:
            if out is not None:
                RunDirectory(out).require_free()
            return cls(out, None)
        if out is not None:
            raise UsageError("--run files the result with the run; leave --out out")
        if "model" in flags and flags["model"] != {"trust_remote_code": True}:
            raise UsageError("--run looks at the run's own model; leave --model out, or give --out instead of --run")
        manifest = RunDirectory(run).read_manifest()
        folder = Path(manifest.model.folder)
        if not folder.is_dir() or checkpoint.fingerprint(folder) != manifest.model.fingerprint:
            raise UsageError(
                f"{folder} no longer holds the checkpoint that {run} was made from; give --model and --out instead"
            )
        return cls(run, manifest)

    @property
    def settings(self) -> CompareSettings | None:
        """Those of the run."""
        return None if self.manifest is None else self.manifest.settings

    def values(
        self, of_run: Callable[[CompareSettings], dict[str, Any]], given_values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings `written`, laid over what `of_run` makes of the run's.

        Raises:
            UsageError: the run's own run code and are not given now.
        """
        if self.folder is None or self.manifest is None:
            return dict(given_values)
        return resumed_settings(self.folder, of_run(self.manifest.settings), given_values)

    @contextmanager
    def reserve(self, name: str) -> Iterator[None]:
        """Make sure that a document of this name can be written, before it is computed; hold its name in the run, or a
        folder of its own.

        Where nothing comes of it, that folder is removed, so that the same command can be given again, fixed.

        Raises:
            RunDirectoryError: it is there, another process is making it, or the folder is in use.
            StorageError: no folder can be made there.
        """
        if self.folder is None:
            yield
            return
        directory = RunDirectory(self.folder)
        if self.manifest is not None:
            with directory.reserve(name):
                require_absent(self.folder / name)
                yield
            return
        with directory.create():
            try:
                yield
            except BaseException:
                if not Findings(self.folder).exist:
                    directory.remove()
                raise

    def file(self, document: Headroom | Localization | Audit) -> Path | None:
        """Write the document, and the page that shows it; returns the page, None where nothing was to be written.

        Who is writing the run just then is waited for, so that nothing computed is lost.

        Raises:
            RunDirectoryError: there is such a document, or another process keeps writing the run.
            StorageError: the disk refused.
        """
        from mismatch_probe.report.page import write_findings_report, write_report

        if self.folder is None:
            return None
        findings = Findings(self.folder)
        if self.manifest is None:
            findings.write(document)
            return write_findings_report(findings)[0]
        run = RunDirectory(self.folder)
        with run.lock(_LONGEST_WAIT_SECONDS):
            findings.write(document)
            return write_report(run) if run.summary_path.exists() else None
