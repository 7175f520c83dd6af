"""Columns that hold a list a row, as an array a row; what looks at each value by itself looks at all rows at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.stats.sequences import Array, Ints, Mask, rows_of

Rows = list[npt.NDArray[Any]]


def rows_in(column: pa.ChunkedArray) -> Rows:
    """The lists of a column, empty where there is none."""
    return rows_of(np.asarray(pa.compute.list_flatten(column).to_numpy()), offsets_in(column))


def offsets_in(column: pa.ChunkedArray) -> Ints:
    """Where each list begins among the values of all, and where the last ends [N + 1]."""
    lengths = np.asarray(pa.compute.list_value_length(column).fill_null(0).to_numpy(), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(lengths)])


def joined(rows: Sequence[Array]) -> Array:
    """The values of all rows, one row after another."""
    return np.concatenate(rows) if len(rows) else np.zeros(0)


def each(rows: Rows, change: Callable[[Array], Array]) -> Rows:
    """Every row, changed value by value."""
    return rows_of(change(joined(rows)), _offsets(rows))


def rows_with(rows: Rows, test: Callable[[Array], Mask]) -> Mask:
    """Rows with a value that the test holds of [N]."""
    holds = np.asarray(test(joined(rows)), dtype=np.bool_)
    return np.asarray(np.bincount(_row_of_each(rows)[holds], minlength=len(rows)) > 0)


def count(rows: Rows, test: Callable[[Array], Mask]) -> int:
    """Values of all rows that the test holds of."""
    return int(test(joined(rows)).sum())


def chosen(rows: Rows, masks: Rows | None) -> Rows:
    """Of each row [T] the values that its mask [T] chooses, all without masks; a row of another length stays whole."""
    if masks is None:
        return rows
    whole = [
        mask if row.size == mask.size else np.ones(row.size, dtype=np.bool_)
        for row, mask in zip(rows, masks, strict=True)
    ]
    mask = joined(whole).astype(np.bool_)
    lengths = np.bincount(_row_of_each(rows)[mask], minlength=len(rows))
    return rows_of(joined(rows)[mask], np.concatenate([[0], np.cumsum(lengths)]))


def _offsets(rows: Rows) -> Ints:
    return np.concatenate([[0], np.cumsum([row.size for row in rows], dtype=np.int64)])


def _row_of_each(rows: Rows) -> Ints:
    return np.repeat(np.arange(len(rows)), [row.size for row in rows])
