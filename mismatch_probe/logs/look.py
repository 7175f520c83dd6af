"""The files of a log, and a look at the start of one, by which formats are distinguished."""

import os
import pickle
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.logs.pickles import first_words
from mismatch_probe.logs.row import LONGEST_LINE_BYTES, next_line, parse_line, size_of
from mismatch_probe.logs.torch_files import words_in_torch_file
from mismatch_probe.reading import Unreadable, as_object, is_folder, is_there, open_file


class FileKind(StrEnum):
    LINES = "JSON lines"
    DOCUMENT = "JSON document"
    PARQUET = "parquet"
    TORCH = "PyTorch file"
    PICKLE = "pickle"
    OTHER = "other"


_MAGIC: Final = {b"PAR1": FileKind.PARQUET, b"PK\x03\x04": FileKind.TORCH, b"\x80": FileKind.PICKLE}
_UNPACKED_BY: Final = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\x00": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
"""The command that unpacks a file that begins so."""
_MAGIC_BYTES: Final = 64
_START_BYTES: Final = 2**16
_FIRST_OBJECTS: Final = 16
"""A field may be absent from the first of them: a call that failed has no samples."""
_MOST_KEYS: Final = 1024
_MOST_FOOTER_BYTES: Final = 2**24
WORDS: Final = frozenset(
    {
        "format_version",
        "rank",
        "responses",
        "rollout_data",
        "rollout_id",
        "rollout_log_probs",
        "samples",
        "tensordict",
        "weight_versions",
    }
)
"""Names of fields by which formats of `torch.save` are distinguished, in whichever order a writer puts them."""


@dataclass(frozen=True)
class FileLook:
    """What the start of a file shows, by which a format recognises it."""

    kind: FileKind
    keys: frozenset[str] = frozenset()
    """Of the first objects, or the columns of the table."""
    inside: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By such a key, the keys of the objects that it holds; by `KEY.INNER` those of the objects one level deeper, but
    for empty ones."""
    words: frozenset[str] = frozenset()
    """Those of `WORDS` that a file of `torch.save` has anywhere, or the first texts and names in another pickle."""
    why_other: str | None = None
    """Why nothing of it could be seen."""

    def lines_with(self, *keys: str) -> bool:
        """Whether the file is JSON lines whose first objects have all of `keys`."""
        return self.kind == FileKind.LINES and self.keys.issuperset(keys)

    def saved_with(self, *words: str) -> bool:
        """Whether it is a file of `torch.save` that has all of `words`, which are of `WORDS`, wherever they stand."""
        assert WORDS.issuperset(words)
        return self.kind == FileKind.TORCH and self.words.issuperset(words)

    def json_with(self, *keys: str) -> bool:
        """Whether the file is JSON lines, or one JSON document of any number of lines, with all of `keys`."""
        return self.kind in (FileKind.LINES, FileKind.DOCUMENT) and self.keys.issuperset(keys)

    def objects_with(self, key: str, *keys: str) -> bool:
        """Whether the file is JSON lines whose first objects hold, under `key`, objects that have all of `keys`."""
        return self.lines_with(key) and self.inside.get(key, frozenset()).issuperset(keys)

    def table_with(self, *columns: str) -> bool:
        return self.kind == FileKind.PARQUET and self.keys.issuperset(columns)


def look_at(path: Path) -> FileLook:
    """What the start of the file says of it; nothing where it cannot be read."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return FileLook(FileKind.OTHER)
    return _look_at(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2**16)
def _look_at(path: Path, size: int, modification_time: int) -> FileLook:
    """A file is looked at again when it has changed."""
    try:
        with open_file(path) as file:
            start = file.read(_MAGIC_BYTES)
            file.seek(0)
            kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), FileKind.LINES)
            return _LOOKS[kind](file)
    except (FileNotFoundError, Unreadable, UnicodeDecodeError, pa.ArrowException) as error:
        return FileLook(FileKind.OTHER, why_other=message_of(error))


def _lines(file: IO[bytes]) -> FileLook:
    start = file.read(_MAGIC_BYTES).removeprefix(BOM_UTF8).lstrip()
    if command := next((command for magic, command in _UNPACKED_BY.items() if start.startswith(magic)), None):
        raise Unreadable(f"it is compressed, and has to be unpacked first ({command})")
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise Unreadable("it is UTF-16 text, and has to be saved as UTF-8")
    if start.startswith(b"["):
        raise Unreadable("it is a JSON list, and each of its objects must stand on a line of its own (jq -c '.[]')")
    if start and not start.startswith(b"{"):
        raise Unreadable(
            "it is neither JSON objects, nor parquet, nor a pickle, nor a CSV with commas and a column Step"
        )
    file.seek(0)
    end = size_of(file)
    while (line := next_line(file, end - file.tell())) and not line.strip():
        pass
    if not line:
        raise Unreadable("it is empty")
    kind = FileKind.LINES
    try:
        first = parse_line(line)
    except Unreadable:
        document = line + file.read(LONGEST_LINE_BYTES)
        if len(document) > LONGEST_LINE_BYTES or (first := _document(document)) is None:
            raise
        kind = FileKind.DOCUMENT
    keys: set[str] = set()
    inside: dict[str, frozenset[str]] = {}
    for item in (as_object(first), *(_next_objects(file, end) if kind is FileKind.LINES else ())):
        if len(item) > _MOST_KEYS:
            raise Unreadable(f"a line of it has more than {_MOST_KEYS:,} keys, which no log of responses has")
        keys.update(item)
        for name, of_objects in _keys_inside(item):
            inside[name] = inside.get(name, frozenset()) | of_objects
    return FileLook(kind, frozenset(keys), inside)


def _document(content: bytes) -> Any:
    """The value of a document of several lines; None where the content is no such document."""
    with suppress(Unreadable):
        return parse_line(content)
    return None


def _next_objects(file: IO[bytes], end: int) -> Iterator[dict[str, Any]]:
    """A few more objects of JSON lines, up to the first line that is none."""
    for _ in range(_FIRST_OBJECTS - 1):
        if file.tell() > _START_BYTES:
            return
        try:
            line = next_line(file, end - file.tell())
            if line.strip():
                yield as_object(parse_line(line))
        except Unreadable:  # reported when the line is read
            return


def _keys_inside(item: Mapping[str, Any]) -> Iterator[tuple[str, frozenset[str]]]:
    """The keys of the object, or of the first of a list, that stands under each key, and those one level deeper."""
    for key, value in item.items():
        inner = _first_object(value)
        yield key, frozenset(inner)
        yield from (
            (f"{key}.{name}", frozenset(deep for deep, content in _first_object(values).items() if content))
            for name, values in inner.items()
            if isinstance(values, dict | list)
        )


def _first_object(value: Any) -> dict[str, Any]:
    item = value[0] if isinstance(value, list) and value else value
    return dict(islice(item.items(), _MOST_KEYS)) if isinstance(item, dict) else {}


def _table(file: IO[bytes]) -> FileLook:
    file.seek(-8, os.SEEK_END)
    num_bytes = int.from_bytes(file.read(4), "little")
    if num_bytes > _MOST_FOOTER_BYTES:
        raise Unreadable(f"what it says of its columns is longer than {_MOST_FOOTER_BYTES // 2**20} MiB")
    file.seek(0)
    return FileLook(FileKind.PARQUET, frozenset(pq.read_schema(file).names))


def _pickle(file: IO[bytes]) -> FileLook:
    words = first_words(file.read(_START_BYTES))
    file.seek(-1, os.SEEK_END)
    if file.read() != pickle.STOP:
        raise Unreadable("it is a cut-off pickle")
    return FileLook(FileKind.PICKLE, words=words)


_LOOKS: Final = {
    FileKind.LINES: _lines,
    FileKind.PARQUET: _table,
    FileKind.TORCH: lambda file: FileLook(FileKind.TORCH, words=words_in_torch_file(file, WORDS)),
    FileKind.PICKLE: _pickle,
}


_OF_OTHER_PROGRAMS: Final = frozenset({"wandb", "tensorboard", "mlflow", "swanlab", "__pycache__"})
"""Folders that trackers keep next to a log, some with links of their own."""
_OF_RUNS: Final = (
    frozenset({"manifest.json", "rollouts.parquet", "legs"}),
    frozenset({"manifest.json", "prompts.parquet", "parts"}),
)
"""What a run directory of this tool holds, and an unfinished one: an imported one has a copy of its log."""


def is_run(names: Set[str]) -> bool:
    """Whether a folder with these names in it is a run directory of this tool."""
    return any(names_of_run <= names for names_of_run in _OF_RUNS)


class NoLogError(UsageError):
    """A folder in which no file is a log of the format, or of any; one may still be written."""


@dataclass(frozen=True)
class Source:
    """A file of a log."""

    path: Path
    num_bytes: int
    modified: float
    """Seconds since 1970."""
    step: int | None
    complete: bool | None
    """Whether its system says that it wrote all of it, None where the system never says."""


def files_of(path: Path) -> list[Path]:
    """`path` itself, or the files below the folder `path`, those of an earlier number first.

    Hidden files, the folders of trackers and run directories of this tool below `path` are left out.

    Raises:
        UsageError: nothing is there, a folder cannot be read, or one holds a link, a pipe, a socket or a device.
    """
    if not is_there(path):
        raise UsageError(f"there is no log {path}; name a file that a training system wrote, or its folder")
    return sorted(_files_below(path), key=by_number) if is_folder(path) else [path]


def by_number(path: Path) -> list[tuple[str, int]]:
    """Orders `step_9` before `step_10`."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d{0,18})", str(path))]


def step_in_name(path: Path) -> int | None:
    """The last number of the file's name, without its ending."""
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 16 else None


def _files_below(folder: Path) -> list[Path]:
    files: list[Path] = []
    waiting = [str(folder)]
    while waiting:
        folder_now = waiting.pop()
        try:
            with os.scandir(folder_now) as folder_entries:
                entries = list(folder_entries)
                if folder_now != str(folder) and is_run({entry.name for entry in entries}):
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
            raise UsageError(
                f"the folder {folder_now} cannot be read ({error.strerror}): fix its permissions"
            ) from error
    return files
