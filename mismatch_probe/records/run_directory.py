"""The run directory: where each file lives, who may write, and which finished batches may be reused."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
from filelock import FileLock, Timeout

from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.inert import command_line
from mismatch_probe.reading import is_there
from mismatch_probe.records.digests import read_manifest, write_manifest
from mismatch_probe.records.files import (
    COMPARISONS,
    MANIFEST,
    TEMPORARY_PREFIX,
    RunKind,
    kind_of,
    open_to_append,
    require_kind,
    require_regular_files,
    storage_errors,
)
from mismatch_probe.records.manifest import Manifest, read_document, write_document
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import read_table, write_table


class Parts:
    """The part files of one stage, under `RUN/parts/STAGE/`, named by batch number and output."""

    def __init__(self, folder: Path, outputs: Sequence[str]) -> None:
        self._folder = folder
        self._outputs = tuple(outputs)

    def open(self) -> None:
        """Make the folder."""
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def sibling(self, name: str) -> Path:
        """A folder for what a stage keeps until its last batch is done; it is removed with the parts."""
        return self._folder / name

    def is_done(self, batch: int) -> bool:
        return all(self._path(batch, output).exists() for output in self._outputs)

    def write(self, batch: int, tables: dict[str, pa.Table]) -> None:
        """Record one finished batch."""
        for output in self._outputs:
            write_table(self._path(batch, output), tables[output])

    def read(self, num_batches: int, output: str) -> pa.Table:
        """All batches of one output, in batch order."""
        return pa.concat_tables([read_table(self._path(batch, output)) for batch in range(num_batches)])

    def remove(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)
            if not any(self._folder.parent.iterdir()):
                self._folder.parent.rmdir()

    def _path(self, batch: int, output: str) -> Path:
        return self._folder / f"{batch:06d}-{output}.parquet"


_LOCK: Final = ".lock"
_STARTING: Final = f"{TEMPORARY_PREFIX}run"
"""Is there while a run's first files are written, and where a process was killed meanwhile."""
_FIRST: Final = frozenset({"prompts.parquet", "rollouts.parquet", "legs", "log", "evaluation.json", "sanity.json"})
"""What is written before the manifest."""


class RunDirectory:
    """Paths and documents of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / MANIFEST
        self.prompts_path = path / "prompts.parquet"
        self.rollouts_path = path / "rollouts.parquet"
        self.summary_path = path / "summary.json"
        self.report_path = path / "report.html"

    def leg_path(self, name: str) -> Path:
        return self.path / "legs" / f"{name}.parquet"

    def log_path(self, job: str) -> Path:
        return self.path / "logs" / f"{job}.log"

    def parts(self, stage: str, outputs: tuple[str, ...]) -> Parts:
        return Parts(self.path / "parts" / stage, outputs)

    @property
    def is_run(self) -> bool:
        return is_there(self.manifest_path)

    @contextmanager
    def create(self) -> Iterator[None]:
        """Make the run directory, and hold it while its first files are written: of many starts, one gets it.

        The manifest is the last of them. What a start left that was killed before is removed, so that the same command
        can be given again. The folders below it appear with their first file.

        Raises:
            RunDirectoryError: something is there already, or another process is writing there.
        """
        self.require_free()
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._hold_lock():
            self.require_free()
            with storage_errors(self.path):
                self._empty()
                open_to_append(self.path / _STARTING).close()
            yield
            with storage_errors(self.path):
                (self.path / _STARTING).unlink(missing_ok=True)

    def require_free(self) -> None:
        """
        Raises:
            RunDirectoryError: something is there already; a directory is never silently reused.
        """
        with storage_errors(self.path):
            has_content = self.path.exists() and not (self.path.is_dir() and self._is_empty())
            if self.is_run:
                raise RunDirectoryError(
                    f"{self.path} already holds a run: continue it with --resume, or give another --out"
                )
            if has_content:
                raise RunDirectoryError(f"{self.path} exists and is not empty: give another --out")
            parent_folder = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
            if not parent_folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{parent_folder} is no folder")
            if not os.access(parent_folder, os.W_OK):
                raise PermissionError(errno.EACCES, f"{parent_folder} may not be written to")

    def _is_empty(self) -> bool:
        """Nothing is here but a lock, and what a process left that was killed before it had a manifest."""
        names = {entry.name for entry in self.path.iterdir()}
        first = _FIRST if _STARTING in names else frozenset()
        return all(name == _LOCK or name.startswith(TEMPORARY_PREFIX) or name in first for name in names)

    def discard_without_results(self) -> None:
        """Remove a run that ended before anything was computed, so that the same command can be given again, fixed."""
        if not any((self.path / name).exists() for name in ("rollouts.parquet", "legs", "parts")):
            self.remove()

    def remove(self) -> None:
        """Empty the directory, and remove it where it can be: not where it is the working directory, a link to a folder
        or a mounted disk.
        """
        self._empty()
        (self.path / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def _empty(self) -> None:
        """Remove all but the lock."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()

    @contextmanager
    def lock(self, wait_seconds: float = 0) -> Iterator[None]:
        """Hold the run for one writer, for which others are waited so long.

        Raises:
            RunDirectoryError: there is no run here, or another process is still writing it.
        """
        if not self.is_run:
            raise RunDirectoryError(
                f"{self.manifest_path} does not exist: it is not a run directory; give the folder that --out named"
            )
        require_regular_files(self.path)
        with self._hold_lock(wait_seconds):
            yield

    @contextmanager
    def reserve(self, name: str) -> Iterator[None]:
        """Hold the name of a file while its content is computed; the run itself stays free for other writers.

        Raises:
            RunDirectoryError: another process holds it.
        """
        require_regular_files(self.path)
        refusal = f"{self.path / name} is being made by another process: wait for it"
        with self._lock(f"{_LOCK}-{name}", 0, refusal):
            yield

    @contextmanager
    def _hold_lock(self, wait_seconds: float = 0) -> Iterator[None]:
        refusal = f"{self.path} is being written by another process: wait for it, or give another --out"
        with self._lock(_LOCK, wait_seconds, refusal):
            yield

    @contextmanager
    def _lock(self, name: str, wait_seconds: float, refusal: str) -> Iterator[None]:
        lock = FileLock(self.path / name)
        with storage_errors(self.path):
            try:
                lock.acquire(timeout=wait_seconds)
            except Timeout as error:
                raise RunDirectoryError(refusal) from error
        try:
            yield
        finally:
            lock.release()

    def write_manifest(self, manifest: Manifest) -> None:
        write_manifest(self.manifest_path, manifest, manifest.run_key)

    def read_manifest(self) -> Manifest:
        """The manifest of this comparison."""
        require_kind(self.path, *COMPARISONS)
        return read_manifest(
            self.manifest_path, Manifest, missing="it is not a run directory", fix="run the comparison again"
        )

    def how_to_finish(self) -> str:
        """The command that makes a summary, as the end of a sentence on a comparison that has none."""
        is_log = kind_of(self.path) == RunKind.IMPORTED
        manifest, recompute = self.read_manifest(), command_line("report", self.path, "--recompute")
        if is_log and any(side.logged for side in manifest.settings.train_sides):
            return f"the import ended before its statistics; make them with `{recompute}`"
        if is_log:
            score = command_line("score", self.path, "--model", "CHECKPOINT", "--out", "SCORED")
            return f"the log has one side's log-probs alone; compute the other's with `{score}`"
        is_recorded = not manifest.growing and all(
            each.state in ("done", "skipped") for each in manifest.stages.values()
        )
        if manifest.stages and is_recorded:
            return f"every leg is recorded, but not the statistics; make them with `{recompute}`"
        return f"the run is unfinished; continue it with `{command_line('compare', '--resume', '--out', self.path)}`"

    def write_summary(self, summary: Summary) -> None:
        write_document(self.summary_path, summary)

    def read_summary(self) -> Summary:
        """The summary of this comparison."""
        require_kind(self.path, *COMPARISONS)
        return read_document(
            self.summary_path,
            Summary,
            missing="" if self.summary_path.exists() else self.how_to_finish(),
            fix=f"make it again with `{command_line('report', self.path, '--recompute')}`",
        )
