"""Files that a flag names to be written: none of them is a file of a run."""

from pathlib import Path
from typing import Final

from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.reading import is_there
from mismatch_probe.records.kinds import kind_of

_ENDINGS: Final = (".md", ".html", ".xml", ".txt", ".toml")
"""Of what people keep beside the files of a run."""
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
    target = _resolved(path)
    if own is not None and target == _resolved(own):
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


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links in a circle, which whoever writes there meets
        return path.absolute()


def _is_run(folder: Path) -> bool:
    try:
        return kind_of(folder) is not None
    except BrokenRecord:
        return any(is_there(folder / name) for name in _SIGNS)
