"""Rows of prompt files. A reader yields (where the row stands, its columns), so that an error can name the place.

A reader is told the flag that named its file.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError
from mismatch_probe.tasks.rows import Row


def read_jsonl(path: Path, flag: str) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except UnicodeDecodeError as error:
        raise UsageError(f"prompt file {path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise _unreadable(path, flag, error) from error


def read_parquet(path: Path, flag: str) -> Iterator[Row]:
    """One row of the table a prompt; batches are read as they are needed.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    try:
        with pq.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    yield Row(f"row {number} of {path}", columns)
                    number += 1
    except pa.ArrowInvalid as error:
        raise UsageError(f"prompt file {path} is no readable parquet: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise _unreadable(path, flag, error) from error


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def _parse_line(path: Path, number: int, line: str) -> Row:
    where = f"line {number} of {path}"
    try:
        columns = json.loads(line)
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} escapes half a surrogate pair, which is no text; mend or remove it") from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise UsageError(f"{where} is malformed JSON ({what} at column {error.colno}); mend it") from error
    except RecursionError as error:
        raise UsageError(f"{where} nests deeper than can be read; mend or remove it") from error
    if not isinstance(columns, dict):
        raise UsageError(f"{where} is a JSON {type(columns).__name__}, not an object; write one {{...}} a line")
    return Row(where, columns)


def _unreadable(path: Path, flag: str, error: OSError) -> UsageError:
    return UsageError(f"prompt file {path} cannot be read ({error.strerror or error}); give {flag} another path")
