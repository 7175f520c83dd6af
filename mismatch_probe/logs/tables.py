"""Parquet tables, a few rows at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError, said
from mismatch_probe.logs.row import Row
from mismatch_probe.reading import Unreadable, opened

_ROWS_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 2**20


def read_table(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    """Each row, with those of `columns` that the table has. Lists of numbers are arrays, in which null is NaN.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    number = 0
    try:
        with opened(path) as file, pq.ParquetFile(file, buffer_size=_BYTES_AT_ONCE) as table:
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=there):
                values = {name: _values(batch.column(name)) for name in there}
                for index in range(batch.num_rows):
                    yield Row(f"row {number} of {path}", {name: column[index] for name, column in values.items()})
                    number += 1
    except FileNotFoundError as error:
        raise UsageError(f"the log {path} does not exist") from error
    except (Unreadable, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the log {path} is no readable parquet ({said(error)}); have it written again") from error


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        kind = column.type.value_type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return [row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in column]
    values: list[Any] = column.to_pylist()
    return values
