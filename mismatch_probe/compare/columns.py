"""Columns that hold a list a row as arrays, and the zeros of a log that stand for what was not recorded."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.stats.sequences import Array, Ints, Mask, Reals, rows_of
from mismatch_probe.stats.zeros import zeros_for_missing

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


def without_zeros_for_missing(
    logprobs: Mapping[str, list[Reals]], judged: Collection[str]
) -> tuple[dict[str, list[Reals]], int]:
    """The log-probs of each row, by their role in a pair (`mu`, `pi`, `ref`), with NaN for such zeros of the roles to
    be judged; and how many tokens have one. A row whose roles are not of one length stays as it is.
    """
    of_rows = zip(*logprobs.values(), strict=True)
    rows = [row for row, sides in enumerate(of_rows) if sides[0].size and len({side.size for side in sides}) == 1]
    cleaned = {role: list(values) for role, values in logprobs.items()}
    if not rows:
        return cleaned, 0
    offsets = np.cumsum([0, *(logprobs["mu"][row].size for row in rows)])
    with_one: Mask = np.zeros(offsets[-1], dtype=np.bool_)
    for role in (role for role in judged if role in logprobs):
        values, others = (
            np.concatenate([logprobs[name][row] for row in rows]) for name in (role, "pi" if role == "mu" else "mu")
        )
        absent = zeros_for_missing(values, others, offsets)
        with_one |= absent
        if absent.any():
            parts = rows_of(np.where(absent, np.nan, values), offsets)
            for row, part in zip(rows, parts, strict=True):
                cleaned[role][row] = part
    return cleaned, int(with_one.sum())
