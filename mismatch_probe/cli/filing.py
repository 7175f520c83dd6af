"""Where `headroom`, `localize` and `audit` take their settings from and put what they found."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.resuming import resumed_settings
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.examinations import Audit, Headroom
from mismatch_probe.records.findings import Findings, Localization, require_absent
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import write_findings_report, write_report

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
