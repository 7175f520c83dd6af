"""The run directory: where each file lives, who may write, and what may be reused."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.records.atomic import TEMPORARY_PREFIX, storage_errors, write_text
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.parts import Parts
from mismatch_probe.records.summary import SCHEMA_VERSION, Summary

_NO_RUN = "it is not a run directory; give the folder that --out named"


class RunDirectory:
    """Paths and documents of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def prompts_path(self) -> Path:
        return self.path / "prompts.parquet"

    @property
    def rollouts_path(self) -> Path:
        return self.path / "rollouts.parquet"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def leg_path(self, name: str) -> Path:
        return self.path / "legs" / f"{name}.parquet"

    def log_path(self, job: str) -> Path:
        return self.path / "logs" / f"{job}.log"

    def parts(self, stage: str, outputs: tuple[str, ...]) -> Parts:
        return Parts(self.path / "parts" / stage, outputs)

    @property
    def is_run(self) -> bool:
        return self.manifest_path.exists()

    def create(self) -> None:
        """Make an empty run directory; the folders below it appear with their first file. Raises as `require_free`."""
        self.require_free()
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def require_free(self) -> None:
        """
        Raises:
            RunDirectoryError: something is there already; a directory is never silently reused.
            StorageError: no directory can be made there.
        """
        with storage_errors(self.path):
            if self.is_run:
                raise RunDirectoryError(
                    f"{self.path} already holds a run: continue it with --resume, or give another --out"
                )
            if self.path.exists() and not (self.path.is_dir() and self._is_empty()):
                raise RunDirectoryError(f"{self.path} exists and is not empty: give another --out")
            above = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
            if not above.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{above} is no folder")
            if not os.access(above, os.W_OK):
                raise PermissionError(errno.EACCES, f"{above} may not be written to")

    def _is_empty(self) -> bool:
        """Nothing is here but what a process killed at its first write left half-written."""
        return all(entry.name.startswith(TEMPORARY_PREFIX) for entry in self.path.iterdir())

    def discard_without_results(self) -> None:
        """Remove a run that ended before anything was computed, so that the same command can be given again, mended."""
        if not any((self.path / name).exists() for name in ("rollouts.parquet", "legs", "parts")):
            shutil.rmtree(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one writer.

        Raises:
            RunDirectoryError: there is no run here, or another process is writing it.
        """
        if not self.is_run:
            raise RunDirectoryError(f"{self.manifest_path} does not exist: {_NO_RUN}")
        lock = FileLock(self.path / ".lock")
        with storage_errors(self.path):
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise RunDirectoryError(
                    f"{self.path} is being written by another process: wait for it, or give another --out"
                ) from error
        try:
            yield
        finally:
            lock.release()

    def write_manifest(self, manifest: Manifest) -> None:
        write_text(self.manifest_path, manifest.model_dump_json(indent=2) + "\n")

    def read_manifest(self) -> Manifest:
        """The manifest of this run.

        Raises:
            RunDirectoryError: there is no run here.
            BrokenRecord: the manifest cannot be read by this version.
        """
        text = self._read(self.manifest_path, _NO_RUN)
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            raise BrokenRecord(
                f"{self.manifest_path} cannot be read by this version ({_first(error)}); run the comparison again"
            ) from error

    def write_summary(self, summary: Summary) -> None:
        write_text(self.summary_path, summary.model_dump_json(indent=2) + "\n")

    def read_summary(self) -> Summary:
        """The summary of this run.

        Raises:
            RunDirectoryError: there is none yet.
            BrokenRecord: it is damaged or of another schema version.
        """
        unfinished = "the run is unfinished; continue it with --resume"
        text = self._read(self.summary_path, unfinished if self.is_run else _NO_RUN)
        try:
            version = json.loads(text).get("schema_version")
            if version != SCHEMA_VERSION:
                raise BrokenRecord(
                    f"{self.summary_path} has schema version {version}, this version reads {SCHEMA_VERSION}; "
                    "make it again with `mismatch-probe report RUN --recompute`"
                )
            return Summary.model_validate_json(text)
        except (ValidationError, json.JSONDecodeError, AttributeError) as error:
            raise BrokenRecord(
                f"{self.summary_path} cannot be read ({_first(error)}); "
                "make it again with `mismatch-probe report RUN --recompute`"
            ) from error

    def _read(self, path: Path, missing: str) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunDirectoryError(f"{path} does not exist: {missing}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise BrokenRecord(f"{path} cannot be read ({error})") from error


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return str(error).splitlines()[0]
