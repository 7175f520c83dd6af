"""Parquet tables, a few rows at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError, said
from mismatch_probe.logs.row import Row
from mismatch_probe.reading import Unreadable, opened

_MOST_ROWS_AT_ONCE: Final = 1024
_VALUES_AT_ONCE: Final = 2**17
"""Of each column."""
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
            for batch in table.iter_batches(batch_size=rows_at_once(table.metadata), columns=there):
                values = {name: _values(batch.column(name)) for name in there}
                for index in range(batch.num_rows):
                    yield Row(f"row {number} of {path}", {name: column[index] for name, column in values.items()})
                    number += 1
    except FileNotFoundError as error:
        raise UsageError(f"the log {path} does not exist") from error
    except (Unreadable, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the log {path} is no readable parquet ({said(error)}); have it written again") from error


def rows_at_once(metadata: pq.FileMetaData) -> int:
    """So many that their columns fit a small memory, by the mean length of a row's lists."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [(group.column(index), group.num_rows) for group in groups for index in range(group.num_columns)]
    longest = max((column.num_values / max(1, num_rows) for column, num_rows in columns), default=1)
    return int(min(_MOST_ROWS_AT_ONCE, max(1, _VALUES_AT_ONCE / max(1, longest))))


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        kind = column.type.value_type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return [row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in column]
    values: list[Any] = column.to_pylist()
    return values
