"""Rows of prompt files. A reader yields (where the row stands, its columns), so that an error can name the place.

A reader is told the flag that named its file.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, opened, opened_text, parse_json, require_text
from mismatch_probe.tasks.rows import Row


def read_jsonl(path: Path, flag: str) -> Iterator[Row]:
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


def read_parquet(path: Path, flag: str) -> Iterator[Row]:
    """One row of the table a prompt; batches are read as they are needed.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    try:
        with opened(path) as file, pq.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    yield Row(f"row {number} of {path}", columns)
                    number += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"prompt file {path} is no readable parquet: {str(error).splitlines()[0]}") from error
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def _parse_line(path: Path, number: int, line: str) -> Row:
    where = f"line {number} of {path}"
    try:
        columns = parse_json(line)
        require_text(json.dumps(columns, ensure_ascii=False))
    except Unreadable as error:
        raise UsageError(f"{where} cannot be read ({error}); mend or remove it") from error
    if not isinstance(columns, dict):
        raise UsageError(f"{where} is a JSON {type(columns).__name__}, not an object; write one {{...}} a line")
    return Row(where, columns)


def _unreadable(path: Path, flag: str, error: Exception) -> UsageError:
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
    return UsageError(f"prompt file {path} cannot be read ({reason}); mend it, or give {flag} another")
