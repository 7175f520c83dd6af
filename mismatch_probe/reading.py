"""Files that people and other programs wrote, read strictly: what has two meanings, or none, is refused and why.

Tables stand in tables, as settings do: made from dotted names, made flat, laid over each other, compared.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Final

_LONGEST_QUOTED: Final = 40
_NAMES: Final[dict[type, str]] = {type(None): "null", bool: "true or false", list: "a list", str: "a text"}
_NOTHING_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class Unreadable(ValueError):  # noqa: N818 - the name says what happened
    """Why a file or a text cannot be used, in words that fit behind `cannot be read: `."""


def is_there(path: Path) -> bool:
    """Whether anything is at `path`; False also where the path itself is none, too long or with a NUL byte in it."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`; False where `is_there` is."""
    return is_there(path) and path.is_dir()


def as_path(value: object) -> Path:
    """
    Raises:
        Unreadable: it is neither a text nor a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise Unreadable(f"{value!r:.40} is no path; give a text or a pathlib.Path")
    return Path(value)


def expand_user(text: str) -> Path:
    """The path that a person wrote, `~` and `~user` resolved.

    Raises:
        Unreadable: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise Unreadable(f"there is no user {Path(text).parts[0].removeprefix('~')!r} here") from error


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """A regular file to read: not a pipe, which would be waited for, a device, which may have no end, or a folder.

    Raises:
        FileNotFoundError: nothing is there.
        Unreadable: it is no regular file, may not be read, or fails while it is read.
    """
    try:
        with os.fdopen(_descriptor(path), "rb") as file:
            yield file
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            raise FileNotFoundError(errno.ENOENT, "it does not exist") from error
        raise Unreadable((error.strerror or str(error)).lower()) from error


@contextmanager
def open_text_file(path: Path) -> Iterator[IO[str]]:
    """As `open_file`, as UTF-8 with or without a byte order mark.

    Raises:
        FileNotFoundError: nothing is there.
        Unreadable: it is no regular file of UTF-8 text.
    """
    try:
        with open_file(path) as file, TextIOWrapper(file, encoding="utf-8-sig") as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 text ({error.reason}); save it as UTF-8") from error


def read_text(path: Path) -> str:
    """A whole file of text. Raises as `open_text_file`."""
    with open_text_file(path) as file:
        return file.read()


def read_json(path: Path, *, constants: bool = False) -> Any:
    """What a JSON file holds. Raises as `open_text_file` and `parse_json`."""
    return parse_json(read_text(path), constants=constants)


def parse_json(text: str, *, constants: bool = False) -> Any:
    """What a JSON text means. `constants` lets NaN and Infinity pass, which JSON lacks and Python's writer writes, and
    so a number too large for a float. Of a line without its neighbours only the column of a fault is named, since
    whoever reads lines knows the line's number.

    Raises:
        Unreadable: it is malformed or cut off, names a key twice, nests too deep, or holds a number that is none.
    """
    try:
        value = (_WITH_CONSTANTS if constants else _STRICT).decode(text.rstrip())
    except Unreadable:
        raise
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise Unreadable(f"malformed JSON: {what} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise Unreadable("it nests deeper than can be read") from error
    except ValueError as error:  # Python's limit on the digits of a whole number
        raise Unreadable("it holds a number of more digits than can be read") from error
    return value


def as_object(content: Any) -> dict[str, Any]:
    """
    Raises:
        Unreadable: it is no JSON object.
    """
    if not isinstance(content, dict):
        raise Unreadable(f"it holds {_NAMES.get(type(content), 'a number')}, not an object")
    return content


def without_duplicate_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping that `pairs` make.

    Raises:
        Unreadable: a key stands twice.
    """
    items = list(pairs)
    table = dict(items)
    if len(table) == len(items):
        return table
    table.clear()
    for key, value in items:
        if key in table:
            raise Unreadable(f"it names the key {_quote(key)} twice, and which counts is open; remove one")
        table[key] = value
    return table


def storable(text: str) -> str:
    """`text` with halves of surrogate pairs, which no file takes, written as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def require_text(text: str) -> None:
    """
    Raises:
        Unreadable: it holds half of a surrogate pair, which no file takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("it escapes half a surrogate pair, which is no text") from error


def _descriptor(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise Unreadable("its path holds a NUL byte") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Unreadable("it is a folder" if stat.S_ISDIR(mode) else "it is a pipe or a device, not a file")
    return descriptor


def _no_number(text: str) -> Any:
    raise Unreadable(f"it holds {text}, which is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(f"it holds {_quote(text)}, which is larger than any number here")
    return value


def _quote(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_QUOTED else f"{text[:_LONGEST_QUOTED]}…")


_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=without_duplicate_keys, parse_constant=_no_number, parse_float=_finite
)
_WITH_CONSTANTS: Final = json.JSONDecoder(object_pairs_hook=without_duplicate_keys)


SettingsTable = Mapping[str, Any]


def nest_names(by_dotted_name: SettingsTable) -> dict[str, Any]:
    """`{"model.path": "x"}` as `{"model": {"path": "x"}}`; what is None is left out."""
    tables: dict[str, Any] = {}
    for name, value in by_dotted_name.items():
        if value is None:
            continue
        table = tables
        *path, last = name.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def flat(tables: SettingsTable, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is no table, or an empty one, under dotted names; lists stay whole."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def merge_tables(base: SettingsTable, override: SettingsTable) -> dict[str, Any]:
    """`base` with `override` laid over it, table by table."""
    result = dict(base)
    for key, value in override.items():
        base_table = result.get(key)
        result[key] = (
            merge_tables(base_table, value) if isinstance(base_table, Mapping) and isinstance(value, Mapping) else value
        )
    return result


def differences(first: SettingsTable, second: SettingsTable, absent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """The dotted names under which two tables hold other values, and both; `absent` stands for one that is missing."""
    for name in {**first, **second}:
        tables = first.get(name, {}), second.get(name, {})
        if all(isinstance(table, Mapping) for table in tables):
            yield from ((f"{name}.{name_below}", old, new) for name_below, old, new in differences(*tables, absent))
        elif first.get(name, absent) != second.get(name, absent):
            yield name, first.get(name, absent), second.get(name, absent)
