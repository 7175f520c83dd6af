"""Files appear whole or not at all: temporary file, fsync, rename, fsync of the folder."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mismatch_probe.errors import BrokenRecord, StorageError
from mismatch_probe.records.regular_files import open_to_read, require_regular

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
    """Yield a temporary file beside `path`; on a clean exit it becomes `path`, on an error it is removed.

    Its name cannot be foreseen and is none that is there already. Its writer holds a lock on it, so that what a killed
    process left of this file is told from what another one is writing, and is removed.

    Raises:
        StorageError: the disk refused the write, or `path` is a link, a pipe, a socket or a device.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_replaceable(path)
        _remove_leftovers(path)
        file, temporary = _temporary_beside(path)
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


def _temporary_beside(path: Path) -> tuple[BinaryIO, Path]:
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
    """Write `data` to `path` whole or not at all.

    Raises:
        StorageError: the disk refused the write.
    """
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
