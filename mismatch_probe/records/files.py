"""Files of a run directory: written whole or not at all, and opened only where regular; and what a folder holds.

A symbolic link would lead a read, a write or a removal out of the directory; a pipe would wait for ever. Every command
that takes a folder asks here what it holds.
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Final

from mismatch_probe.errors import BrokenRecord, RunDirectoryError, StorageError, UsageError
from mismatch_probe.inert import command_line
from mismatch_probe.reading import Unreadable, as_object, is_folder, is_there, read_json

JOINED_FOLDER: Final = "joined"
"""In the run of a log: the turns behind a break as a trainer has them that joins the turns."""
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OF_OTHER_PROGRAMS: Final = ("wandb",)
"""Folders of a run that hold links of another program, and that nothing here reads."""
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def require_regular_files(folder: Path) -> None:
    """Nothing below `folder` is other than a folder or a regular file; folder itself may be reached through links.

    Raises:
        BrokenRecord: something is, or a folder cannot be read.
    """
    folders = [str(folder)]
    while folders:
        current = folders.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        if not entry.is_file(follow_symlinks=False):
                            require_regular(Path(entry.path))
                    elif current != str(folder) or entry.name not in _OF_OTHER_PROGRAMS:
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BrokenRecord(
                f"the folder {current} cannot be read ({error.strerror}): fix its permissions"
            ) from error


def require_regular(path: Path) -> None:
    """`path` is a regular file, a folder, or nothing.

    Raises:
        BrokenRecord: it is a link, a pipe, a socket or a device.
        OSError: it cannot be looked at.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(path.lstat().st_mode))
    except FileNotFoundError:
        return
    if kind is not None:
        raise BrokenRecord(
            f"{path} is {kind}, and in a run directory nothing but folders and regular files is opened: "
            "put the file itself there, or remove it"
        )


def open_to_read(path: Path) -> BinaryIO:
    """The regular file at `path`, open.

    Raises:
        BrokenRecord: it is a link, a pipe, a socket or a device.
        OSError: it is not there or cannot be read.
    """
    return _open_file(path, os.O_RDONLY, "rb")


def open_to_append(path: Path) -> BinaryIO:
    """The regular file at `path`, made where it is absent, open at its end. Raises as `open_to_read`."""
    return _open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")


def read_regular_text(path: Path, *, errors: str = "strict") -> str:
    """All of the regular file at `path`, from UTF-8.

    Raises:
        BrokenRecord: it is a link, a pipe, a socket or a device.
        OSError: it is not there or cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_to_read(path) as file:
        return file.read().decode("utf-8", errors=errors)


def _open_file(path: Path, flags: int, mode: Any) -> BinaryIO:
    """The flags hold also where the file is exchanged for a link between the look at it and its opening."""
    require_regular(path)
    descriptor = os.open(path, flags | _SAFELY, 0o666)
    try:
        file: BinaryIO = os.fdopen(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return file


TEMPORARY_PREFIX = ".writing-"

_REASONS = {
    errno.ENOSPC: "the disk is full; free space, or give --out on another disk",
    errno.EDQUOT: "the disk quota is used up; free space, or give --out on another disk",
    errno.EROFS: "the file system is read-only; give --out somewhere writable",
    errno.EACCES: "permission is denied; give --out somewhere you may write",
    errno.EPERM: "permission is denied; give --out somewhere you may write",
    errno.EEXIST: "a part of the path is a file, not a folder; give another --out",
    errno.ENOTDIR: "a part of the path is a file, not a folder; give another --out",
    errno.ENAMETOOLONG: "the path is too long; give a shorter --out",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one sentence that names the path.

    Raises:
        StorageError: a write below was refused.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}; give another --out")
        raise StorageError(f"cannot write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the folder of `path`; on a clean exit it becomes `path`, on an error it is removed.

    Its name cannot be foreseen and is none that is there already. Its writer holds a lock on it, so that what a killed
    process left of this file is distinguished from what another one is writing, and is removed.

    Raises:
        StorageError: the disk refused the write, or `path` is a link, a pipe, a socket or a device.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_replaceable(path)
        _remove_leftovers(path)
        file, temporary = _temporary_file(path)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _require_replaceable(path: Path) -> None:
    try:
        require_regular(path)
    except BrokenRecord as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _temporary_file(path: Path) -> tuple[BinaryIO, Path]:
    """A new file that this process has locked, and where it is."""
    while True:
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb")
        with suppress(OSError):  # some network file systems have no locks, and nothing is removed there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return file, temporary
        file.close()


def _remove_leftovers(path: Path) -> None:
    """Temporary files of `path` whose writer is gone."""
    name = f"{TEMPORARY_PREFIX}{path.name}"
    for leftover in path.parent.iterdir():
        if leftover.name == name or leftover.name.startswith(f"{name}."):
            with suppress(OSError, BrokenRecord), open_to_read(leftover) as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8; lone surrogates of hostile text are escaped rather than refused."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST: Final = "manifest.json"
EVALUATION: Final = "evaluation.json"
HEADROOM_FILE: Final = "headroom.json"
AUDIT_FILE: Final = "audit.json"
LOCALIZATIONS: Final = "localize-*-*.json"
EXPLANATIONS: Final = "explain*.json"
CURVES_FILE: Final = "curves.json"
ABLATION_FILE: Final = "ablation.json"


class RunKind(Enum):
    """How a sentence names it, and what takes it."""

    COMPARISON = "a comparison", "`compare --resume` continues it"
    IMPORTED = "an imported log", "`report` shows it, `score` and `explain` compute on its token ids"
    EVALUATION = "an evaluation", "`evaluate --resume` continues it"
    TRAINING = "a training run", "`report` shows it, `train --resume` continues it"
    SANITY = "a sanity test", "`report` shows it, `sanity --resume` continues it"
    ABLATION = "an ablation", "`report` shows it, `ablate --resume` continues it"
    HEADROOM = "what headroom found", "`report` shows it"
    AUDIT = "what audit found", "`report` shows it"
    LOCALIZATION = "what localize found", "`report` shows it"
    CURVES = "a reading of metrics alone", "`report` shows it"

    def __init__(self, noun: str, takers: str) -> None:
        self.noun = noun
        self.takers = takers


COMPARISONS: Final = (RunKind.COMPARISON, RunKind.EVALUATION, RunKind.IMPORTED)
"""An evaluation is a comparison and what its responses earned; of an imported log, both sides were logged."""
TRAININGS: Final = (RunKind.TRAINING, RunKind.SANITY)
FINDINGS: Final = (RunKind.HEADROOM, RunKind.LOCALIZATION, RunKind.AUDIT)


def kind_of(folder: Path) -> RunKind | None:
    """What the folder holds; None where it is not there, or holds nothing of this tool.

    Raises:
        BrokenRecord: it holds a manifest that cannot be read, or what is neither a folder nor a regular file.
    """
    path = folder / MANIFEST
    try:
        if is_there(path):
            require_regular_files(folder)
        manifest = as_object(read_json(path))
    except FileNotFoundError:
        if is_there(folder / HEADROOM_FILE):
            return RunKind.HEADROOM
        if is_there(folder / AUDIT_FILE):
            return RunKind.AUDIT
        if is_there(folder / CURVES_FILE):
            return RunKind.CURVES
        return RunKind.LOCALIZATION if is_folder(folder) and any(folder.glob(LOCALIZATIONS)) else None
    except Unreadable as error:
        raise BrokenRecord(f"{path} cannot be read ({error}); give another run, or make it again") from error
    keys = manifest.get("content_keys")
    if "training_version" in manifest:
        return RunKind.SANITY if isinstance(keys, dict) and "sanity" in keys else RunKind.TRAINING
    if "grid_version" in manifest:
        return RunKind.ABLATION
    if manifest.get("log") is not None:
        return RunKind.IMPORTED
    if "manifest_version" in manifest:
        return RunKind.EVALUATION if is_there(folder / EVALUATION) else RunKind.COMPARISON
    raise BrokenRecord(f"{path} cannot be read (it has no version); give another run, or make it again")


def require_kind(folder: Path, *kinds: RunKind) -> None:
    """
    Raises:
        RunDirectoryError: the folder holds something else, or nothing.
        BrokenRecord: it holds a manifest that cannot be read.
    """
    kind = kind_of(folder)
    if kind in kinds:
        return
    if kind is not None:
        raise RunDirectoryError(
            f"{folder} holds {kind.noun} ({kind.takers}), and {kinds[0].noun} is wanted here; give another folder"
        )
    if is_there(folder) and not is_folder(folder):
        raise RunDirectoryError(f"{folder} is a file, not a run directory; give the folder that --out named")
    why = f"{folder / MANIFEST} does not exist" if is_there(folder) else f"{folder} does not exist"
    raise RunDirectoryError(f"{why}: it is not a run directory; give the folder that --out named")


def to_resume(folder: Path | None, *kinds: RunKind) -> Path:
    """The folder whose run goes on.

    Raises:
        UsageError: none is named.
        RunDirectoryError: it holds no run, or one of another kind.
        BrokenRecord: its manifest cannot be read.
    """
    if folder is None:
        raise UsageError("--resume needs --out: the run directory to continue")
    if kind_of(folder) is None:
        raise RunDirectoryError(
            f"{folder} holds no run that --resume could continue: leave --resume out to start one there, or fix --out"
        )
    require_kind(folder, *kinds)
    return folder


_DEEPEST: Final = 3
"""`RUN/parts/STAGE/FILE`"""


def go_on(path: Path) -> str:
    """What is to be typed to continue the comparison that `path`, its directory or a file in it, belongs to."""
    candidates = (path, *list(path.parents)[:_DEEPEST])
    run = next((folder for folder in candidates if is_there(folder / MANIFEST)), None)
    if run is None:
        return "make the run again"
    return f"continue the run with `{command_line('compare', '--resume', '--out', run)}`"
