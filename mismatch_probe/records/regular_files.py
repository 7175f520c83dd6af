"""A run directory may have been made by a stranger: it holds folders and regular files, and nothing else is opened.

A symbolic link would lead a read, a write or a removal out of the directory; a pipe would wait for ever.
"""

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

from mismatch_probe.errors import BrokenRecord

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
    waiting = [str(folder)]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        if not entry.is_file(follow_symlinks=False):
                            require_regular(Path(entry.path))
                    elif here != str(folder) or entry.name not in _OF_OTHER_PROGRAMS:
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BrokenRecord(f"the folder {here} cannot be read ({error.strerror}): mend its permissions") from error


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
    return _opened(path, os.O_RDONLY, "rb")


def open_to_append(path: Path) -> BinaryIO:
    """The regular file at `path`, made where there is none, open at its end. Raises as `open_to_read`."""
    return _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")


def read_regular_text(path: Path, *, errors: str = "strict") -> str:
    """All of the regular file at `path`, from UTF-8.

    Raises:
        BrokenRecord: it is a link, a pipe, a socket or a device.
        OSError: it is not there or cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_to_read(path) as file:
        return file.read().decode("utf-8", errors=errors)


def _opened(path: Path, flags: int, mode: Any) -> BinaryIO:
    """The flags hold also where the file is exchanged for a link between the look at it and its opening."""
    require_regular(path)
    descriptor = os.open(path, flags | _SAFELY, 0o666)
    try:
        file: BinaryIO = os.fdopen(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return file
