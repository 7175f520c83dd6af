"""The files of a log: one, or all that a folder holds. Nothing but folders and regular files is opened."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.reading import is_folder, is_there

_OF_OTHER_PROGRAMS: Final = frozenset({"wandb", "tensorboard", "mlflow", "swanlab", "__pycache__"})
"""Folders that trackers keep beside a log, some with links of their own."""
_OF_RUNS: Final = frozenset({"manifest.json", "rollouts.parquet", "legs"})
"""What a run directory of this tool holds: an imported one has a copy of its log."""


class NoLogError(UsageError):
    """A folder in which no file is a log of the format, or of any; one may still be written."""


@dataclass(frozen=True)
class Source:
    """A file of a log. modified: seconds since 1970. complete: whether its system says that it wrote all of it, None
    where the system never says."""

    path: Path
    num_bytes: int
    modified: float
    step: int | None
    complete: bool | None


def files_of(path: Path) -> list[Path]:
    """`path` itself, or the files below the folder `path`, those of an earlier number first.

    Hidden files, the folders of trackers and run directories of this tool below `path` are left out.

    Raises:
        UsageError: nothing is there, a folder cannot be read, or one holds a link, a pipe, a socket or a device.
    """
    if not is_there(path):
        raise UsageError(f"the log {path} does not exist; name a file that a training system wrote, or its folder")
    return sorted(_below(path), key=by_number) if is_folder(path) else [path]


def by_number(path: Path) -> list[tuple[str, int]]:
    """Orders `step_9` before `step_10`."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d{0,18})", str(path))]


def step_in_name(path: Path) -> int | None:
    """The last number of the file's name, without its ending."""
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 16 else None


def _below(folder: Path) -> list[Path]:
    files: list[Path] = []
    waiting = [str(folder)]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as listed:
                entries = list(listed)
                if here != str(folder) and _OF_RUNS.issubset(entry.name for entry in entries):
                    continue
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in _OF_OTHER_PROGRAMS:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        files.append(Path(entry.path))
                    else:
                        raise UsageError(
                            f"{entry.path} is a link, a pipe, a socket or a device, and in the folder of a log nothing "
                            "but folders and regular files is opened: remove it, or name the file or folder to read"
                        )
        except OSError as error:
            raise UsageError(f"the folder {here} cannot be read ({error.strerror}): mend its permissions") from error
    return files
