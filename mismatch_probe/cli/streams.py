"""The standard streams of the process: whoever reads them may go away, and no result is lost by that."""

import fcntl
import io
import os
import sys
from contextlib import suppress
from typing import Any, Final, NoReturn, TextIO

from mismatch_probe.errors import StorageError

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_IF_CLOSED: Final = {_INPUT: os.O_RDONLY, _OUTPUT: os.O_RDONLY, _ERRORS: os.O_WRONLY}
"""How the null device takes the place of a stream that was closed before the start: what is written to standard output
is refused, as it was before; what is written for people is lost."""


def keep_standard_streams() -> None:
    """Call once, at the start of the process.

    What is said meanwhile is dropped from where nobody reads it, and the work goes on. Standard output carries what was
    asked for: a reader that goes away, as `head` does, has read enough; a file that does not take it is a StorageError.
    A stream that is closed gets a descriptor: otherwise the next file to be opened would be it, and a library's
    messages would go into that file.
    """
    for descriptor, flags in _IF_CLOSED.items():
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    sys.stdout = _text(_WhatWasAskedFor(_OUTPUT, "w", closefd=False), sys.stdout)
    sys.stderr = for_people(_ERRORS, sys.stderr, closefd=False)


def output_is_open() -> bool:
    """Whether there was a standard output when the process started."""
    try:
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except (OSError, ValueError):  # no descriptor of this process
        return True


def end_at_once(code: int) -> NoReturn:
    """End the process with what was written so far, and without what libraries do at an end, which can take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, StorageError):
            stream.flush()
    os._exit(code)


def for_people(descriptor: int, like: TextIO | None = None, *, closefd: bool = True) -> TextIO:
    """A text stream on `descriptor`, in the encoding of `like`, that drops what nobody can read any more."""
    return _text(_ForPeople(descriptor, "w", closefd=closefd), like, line_buffering=True)


class _ForPeople(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            _drop_from_now_on(self.fileno())
            return len(data)


class _WhatWasAskedFor(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _drop_from_now_on(self.fileno())
            return len(data)
        except OSError as error:
            _drop_from_now_on(self.fileno())
            raise StorageError(
                f"what was asked for on standard output could not be written to its end: {error.strerror}; give it a "
                "file that takes it"
            ) from error


def _text(raw: io.FileIO, like: TextIO | None, *, line_buffering: bool = False) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )


def _drop_from_now_on(descriptor: int) -> None:
    """What is still in buffers goes nowhere too: where the last flush fails, Python ends with a code of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
