"""Lines and rows of a log, whose columns are read by name or refused with their place."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import Level, LogCode
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, as_object, open_file, parse_json, storable
from mismatch_probe.records.sequences import FloatArray, IntArray, LoggedResponse
from mismatch_probe.stats.sequences import is_usable


@dataclass(frozen=True, kw_only=True)
class LogFinding:
    """One thing that is found in a log."""

    code: LogCode
    sentence: str
    level: Level
    column: str | None = None
    """The field of `LoggedResponse` that it is about; None where it is about the rows."""
    evidence: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        code: LogCode,
        variant: str = "",
        /,
        *,
        column: str | None = None,
        level: Level | None = None,
        evidence: Mapping[str, object] | None = None,
        **figures: object,
    ) -> "LogFinding":
        """A finding in the catalogue's words; `figures` are what these name in braces."""
        return cls(
            code=code,
            sentence=code.sentence(variant, **figures),
            level=level or code.level,
            column=column,
            evidence=evidence or {},
        )


Tell = Callable[[LogFinding], None]
"""Called with what a reader left out, and why."""


_LARGEST_ID: Final = 2**31 - 1
_LARGEST_STEP: Final = 2**53
_LONGEST_TEXT: Final = 4096
_ADVICE: Final = "fix or remove the row"


@dataclass(frozen=True)
class Row:
    """A row's columns and where it stands (`line 3 of FILE`). Each reader of a column raises a UsageError.

    A column that is absent and one that is null are the same.
    """

    where: str
    columns: Mapping[str, Any]

    def has(self, column: str) -> bool:
        return self.columns.get(column) is not None

    def ids(self, column: str) -> IntArray:
        """Token ids, [T]."""
        array = self._list(column)
        if not array.size:
            return np.zeros(0, np.int32)
        kind = array.dtype.kind
        if kind not in "iu" or array.astype(f"{kind}8", copy=False).view(np.uint64).max() > _LARGEST_ID:
            raise self.refusal(f"{column} is no list of token ids, which are whole numbers from 0 on")
        return array.astype(np.int32)

    def numbers(self, column: str, length: int) -> FloatArray:
        """Numbers, [length]; null is NaN."""
        array = self._list(column, length)
        if array.dtype.kind == "O":
            if not all(value is None or type(value) in (int, float) for value in array):
                raise self.refusal(f"{column} is no list of numbers")
            return np.array([np.nan if value is None else as_float(value) for value in array], np.float64)
        if array.size and array.dtype.kind not in "iuf":
            raise self.refusal(f"{column} is no list of numbers")
        return array if array.dtype == np.float32 else array.astype(np.float64)

    def optional_numbers(self, column: str, length: int) -> FloatArray | None:
        return self.numbers(column, length) if self.has(column) else None

    def flags(self, column: str, length: int) -> npt.NDArray[np.bool_]:
        """What is true or 1, [length]."""
        array = self._list(column, length)
        if array.size and (array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all()):
            raise self.refusal(f"{column} is no list of 0 and 1")
        return array.astype(np.bool_)

    def flags_or_all(self, column: str, length: int) -> npt.NDArray[np.bool_]:
        """`flags`, and all true where the column is absent."""
        return self.flags(column, length) if self.has(column) else np.ones(length, np.bool_)

    def number(self, column: str) -> float | None:
        value = self._item(column)
        if value is None:
            return None
        if type(value) in (int, float) and np.isfinite(number := as_float(value)):
            return number
        raise self.refusal(f"{column} is no number")

    def integer(self, column: str) -> int | None:
        """A whole number from 0 on."""
        value = self._item(column)
        if value is None or (type(value) is int and 0 <= value < _LARGEST_STEP):
            return value
        raise self.refusal(f"{column} is no whole number from 0 on")

    def text(self, column: str) -> str | None:
        """A text of at most 4,096 characters, or a whole number as one."""
        value = self.columns.get(column)
        if value is None or type(value) in (str, int):
            return None if value is None else storable(self.short(column, str(value)))
        raise self.refusal(f"{column} is neither a text nor a whole number")

    def short(self, column: str, text: str) -> str:
        """`text`, which a column holds and every row may share."""
        if len(text) > _LONGEST_TEXT:
            raise self.refusal(f"{column} is a text of more than {_LONGEST_TEXT:,} characters")
        return text

    def inside(self, column: str) -> Self:
        """The object that stands in a column, as a row."""
        value = self.columns.get(column)
        if not isinstance(value, Mapping):
            raise self.refusal(f"{column} is no object")
        return type(self)(self.where, value)

    def rows(self, column: str) -> list[Self]:
        """The objects that stand in a column, as rows."""
        value = self.columns.get(column)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.refusal(f"{column} is no list of objects")
        return [type(self)(self.where, item) for item in value]

    def refusal(self, reason: str) -> UsageError:
        return UsageError(f"{self.where}: {reason}; {_ADVICE}")

    def _item(self, column: str) -> Any:
        """One value, also where it was saved as a tensor of one."""
        value = self.columns.get(column)
        return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value

    def _list(self, column: str, length: int | None = None) -> npt.NDArray[Any]:
        value = self.columns.get(column)
        if value is None:
            raise self.refusal(f"it has no {column}")
        if not isinstance(value, list | np.ndarray):
            raise self.refusal(f"{column} is no list")
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise self.refusal(f"{column} holds lists of several lengths, or numbers too large") from error
        if array.ndim != 1:
            raise self.refusal(f"{column} is no plain list")
        if length is not None and array.size != length:
            raise self.refusal(f"{column} has {array.size} entries where the tokens are {length}")
        return array


def as_float(value: int | float) -> float:
    """`value`, infinite where it is a whole number larger than any float, as Python's reader makes `1e400`."""
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf


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
    """Each complete line of the file; blank ones are skipped. A last line that is incomplete is reported and left.
    A file that grows meanwhile is read to the size that it had when it was opened.

    Raises:
        UsageError: the file cannot be read, or a line is too long or no JSON object.
    """
    number = 0
    try:
        with open_file(path) as file:
            remaining = size_of(file)
            for number in count(1):
                line = next_line(file, remaining)
                remaining -= len(line)
                if not line:
                    return
                if not line.strip():
                    continue
                try:
                    columns = as_object(parse_line(line))
                except Unreadable:
                    if line.endswith(b"\n"):
                        raise
                    evidence = {"file": str(path), "line": number}
                    tell(LogFinding.of(LogCode.HALF_WRITTEN, evidence=evidence, file=path, line=number))
                    return
                yield Row(f"line {number} of {path}", columns)
    except FileNotFoundError as error:
        raise UsageError(f"there is no log {path}") from error
    except Unreadable as error:
        where = f"line {number} of {path}" if number else f"the log {path}"
        raise UsageError(f"{where} cannot be read ({error}); fix or remove it") from error


def size_of(file: IO[bytes]) -> int:
    """Bytes of an open file now; it may grow."""
    return os.fstat(file.fileno()).st_size


def next_line(file: IO[bytes], remaining: int) -> bytes:
    """The next line, of the file's next `remaining` bytes; empty where there are none.

    Raises:
        Unreadable: it is too long, and is not read to its end.
    """
    line = file.readline(min(LONGEST_LINE_BYTES + 1, max(0, remaining)))
    if len(line) > LONGEST_LINE_BYTES:
        raise Unreadable(f"a line of it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
    return line


def read_object(path: Path) -> Row:
    """The one JSON object that a file holds, over as many lines as it likes.

    Raises:
        UsageError: the file cannot be read, is too long or no JSON object.
    """
    try:
        with open_file(path) as file:
            content = file.read(LONGEST_LINE_BYTES + 1)
            if len(content) > LONGEST_LINE_BYTES:
                raise Unreadable(f"it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
            return Row(str(path), as_object(parse_line(content)))
    except FileNotFoundError as error:
        raise UsageError(f"there is no log {path}") from error
    except Unreadable as error:
        raise UsageError(f"the log {path} cannot be read ({error}); fix or remove it") from error


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


def is_recorded(log_prob: float) -> bool:
    """Whether a number can be a log-prob that an engine wrote, and is no filler."""
    return bool(is_usable(np.asarray(log_prob))) and log_prob != 0


def split_by_mask(
    *,
    where: str,
    token_ids: IntArray,
    own: npt.NDArray[np.bool_],
    sampled: npt.NDArray[np.bool_],
    log_mu: FloatArray | None = None,
    log_pi: FloatArray | None = None,
    log_ref: FloatArray | None = None,
    entropy_nats: FloatArray | None = None,
    step: int | None = None,
    weight_version: str | None = None,
    temperature: float | None = None,
    group: str | None = None,
    num_padding: int = 0,
) -> LoggedResponse:
    """The response starts at the first token of its own; without any, all is prompt. Arrays [P + T] are cut there. A
    single token before it with a log-prob of the engine, which a mask leaves out, belongs to the response too.

    own: the policy wrote the token. sampled: it did, and the token counts.
    """
    start = int(own.argmax()) if own.any() else own.size
    if log_mu is not None and 1 <= start < own.size and is_recorded(log_mu[start - 1]):
        start -= start < 2 or not is_recorded(log_mu[start - 2])

    def shorten(values: FloatArray | None) -> FloatArray | None:
        return None if values is None else values[start:]

    return LoggedResponse(
        where=where,
        prompt_token_ids=token_ids[:start],
        token_ids=token_ids[start:],
        sampled=sampled[start:],
        log_mu=shorten(log_mu),
        log_pi=shorten(log_pi),
        log_ref=shorten(log_ref),
        entropy_nats=shorten(entropy_nats),
        step=step,
        weight_version=weight_version,
        temperature=temperature,
        group=group,
        num_padding=num_padding,
    )
