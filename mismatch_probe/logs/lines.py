"""JSON lines, one at a time, of a length that has a limit."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any, Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.findings import Level, LogCode, LogFinding, Tell
from mismatch_probe.logs.row import Row
from mismatch_probe.reading import Unreadable, as_object, opened, parse_json

LONGEST_LINE_BYTES: Final = 256 * 2**20
_MOST_PARSED_BYTES: Final = 2**30
_PARSED_BYTES: Final = {b"{": 88, b"[": 88, b",": 40, b":": 120, b'"': 30}
"""What Python takes for what such a character begins, ends or parts: an object, a list, a number, a key, a text."""
_OF_PLAIN_TEXT: Final = 2
_OF_WIDE_TEXT: Final = 5
"""Bytes for a byte of the line, with its text: 4 for each character where one is outside the plane of most."""
_SMALL_BYTES: Final = _MOST_PARSED_BYTES // (max(_PARSED_BYTES.values()) + _OF_WIDE_TEXT)
"""A line of these can take no more than is allowed."""


def read_lines(path: Path, tell: Tell) -> Iterator[Row]:
    """Each whole line of the file; blank ones are skipped. What was still being written at the end is told and left.
    A file that grows meanwhile is read to the size that it had when it was opened.

    Raises:
        UsageError: the file cannot be read, or a line is too long or no JSON object.
    """
    number = 0
    try:
        with opened(path) as file:
            left = size_of(file)
            for number in count(1):
                line = next_line(file, left)
                left -= len(line)
                if not line:
                    return
                if not line.strip():
                    continue
                try:
                    columns = as_object(parse_line(line))
                except Unreadable:
                    if line.endswith(b"\n"):
                        raise
                    tell(_half_written(path, number))
                    return
                yield Row(f"line {number} of {path}", columns)
    except FileNotFoundError as error:
        raise UsageError(f"the log {path} does not exist") from error
    except Unreadable as error:
        where = f"line {number} of {path}" if number else f"the log {path}"
        raise UsageError(f"{where} cannot be read ({error}); mend or remove it") from error


def size_of(file: IO[bytes]) -> int:
    """Bytes of an open file now; it may grow."""
    return os.fstat(file.fileno()).st_size


def next_line(file: IO[bytes], left: int) -> bytes:
    """The next line, of the file's next `left` bytes; empty where there are none.

    Raises:
        Unreadable: it is too long, and is not read to its end.
    """
    line = file.readline(min(LONGEST_LINE_BYTES + 1, max(0, left)))
    if len(line) > LONGEST_LINE_BYTES:
        raise Unreadable(f"a line of it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
    return line


def read_object(path: Path) -> Row:
    """The one JSON object that a file holds, over as many lines as it likes.

    Raises:
        UsageError: the file cannot be read, is too long or no JSON object.
    """
    try:
        with opened(path) as file:
            content = file.read(LONGEST_LINE_BYTES + 1)
            if len(content) > LONGEST_LINE_BYTES:
                raise Unreadable(f"it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
            return Row(str(path), as_object(parse_line(content)))
    except FileNotFoundError as error:
        raise UsageError(f"the log {path} does not exist") from error
    except Unreadable as error:
        raise UsageError(f"the log {path} cannot be read ({error}); mend or remove it") from error


def parse_line(line: bytes) -> Any:
    """What a line means. NaN and Infinity pass, as Python writes them.

    Raises:
        Unreadable: it is no JSON in UTF-8, or would take more than 1 GiB.
    """
    _require_small(line)
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 text ({error.reason})") from error
    return parse_json(text, constants=True)


def _require_small(line: bytes) -> None:
    """A short line of many empty objects takes 30 times its bytes: count them before any is made."""
    if len(line) <= _SMALL_BYTES:
        return
    text = len(line) * (_OF_PLAIN_TEXT if line.isascii() else _OF_WIDE_TEXT)
    if text + sum(line.count(mark) * size for mark, size in _PARSED_BYTES.items()) > _MOST_PARSED_BYTES:
        raise Unreadable(
            f"it would take more than {_MOST_PARSED_BYTES // 2**30} GiB of memory, so write fewer values a line"
        )


def _half_written(path: Path, number: int) -> LogFinding:
    return LogFinding(
        code=LogCode.HALF_WRITTEN,
        sentence=f"line {number}, the last of {path}, is cut off: the lines before it are read, and it is left out",
        level=Level.WARNING,
        evidence={"file": str(path), "line": number},
    )
