"""Rows of prompt files. A reader yields (where the row stands, its columns), so that an error can name the place.

A reader is told the flag that named its file.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError, said
from mismatch_probe.reading import Unreadable, as_object, opened, opened_text, parse_json, require_text
from mismatch_probe.tasks.rows import PromptRow


def read_jsonl(path: Path, flag: str) -> Iterator[PromptRow]:
    """One JSON object a line; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with opened_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def read_parquet(path: Path, flag: str) -> Iterator[PromptRow]:
    """One row of the table a prompt; batches are read as they are needed.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    try:
        with opened(path) as file:
            for number, columns in enumerate(_table_rows(path, file)):
                yield PromptRow(f"row {number} of {path}", columns)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def _table_rows(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompt file {path} is no readable parquet: {said(error)}") from error


READERS: dict[str, Callable[[Path, str], Iterator[PromptRow]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def _parse_line(path: Path, number: int, line: str) -> PromptRow:
    where = f"line {number} of {path}"
    try:
        columns = as_object(parse_json(line))
        require_text(json.dumps(columns, ensure_ascii=False))
    except Unreadable as error:
        raise UsageError(f"{where} cannot be read ({error}); mend or remove it") from error
    return PromptRow(where, columns)


def _unreadable(path: Path, flag: str, error: Exception) -> UsageError:
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
    return UsageError(f"prompt file {path} cannot be read ({reason}); mend it, or give {flag} another")
