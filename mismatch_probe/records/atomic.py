"""Files appear whole or not at all: temporary file, fsync, rename, fsync of the folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_probe.errors import StorageError

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
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it becomes `path`, on an error it is removed.

    Raises:
        StorageError: the disk refused the write.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` whole or not at all.

    Raises:
        StorageError: the disk refused the write.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8; lone surrogates of hostile text are escaped rather than refused."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
