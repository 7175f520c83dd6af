"""What a caller's own code holds as arrays: padded [B, T] with a mask, a list of rows, or tensors of any library."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mismatch_probe.errors import UsageError
from mismatch_probe.stats.sequences import Array, Floats, Ints, Mask

_ENOUGH_TOKENS: Final = 16

ArrayLike = Any
"""A numpy array, nested lists, or a tensor with `detach` or `__array__`."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie in what was given: the length of each row, and which of its places count [places]."""

    row_lengths: Ints
    counted: Mask

    @classmethod
    def of(cls, values: ArrayLike, mask: ArrayLike | None, name: str) -> "Layout":
        """By one of the arrays, called `name`, and the mask: true or 1 where a token was sampled; None: everywhere.

        Raises:
            UsageError: the mask has another shape.
        """
        rows = _rows(values, name)
        lengths = np.array([row.size for row in rows], dtype=np.int64)
        if mask is None:
            return cls(lengths, np.ones(lengths.sum(), dtype=np.bool_))
        everywhere = cls(lengths, np.ones(lengths.sum(), dtype=np.bool_))
        given = everywhere.flat(mask, "mask", name)
        if not np.isin(given, (0.0, 1.0)).all():
            raise UsageError("mask holds something besides 0 and 1: give 1 where a token was sampled, else 0")
        return cls(lengths, given == 1)

    @property
    def lengths(self) -> Ints:
        """Tokens that count of each row [B]."""
        ends = np.cumsum(self.row_lengths)
        before = np.concatenate([[0], np.cumsum(self.counted)])
        return np.asarray(before[ends] - before[ends - self.row_lengths], dtype=np.int64)

    def flat(self, values: ArrayLike, name: str, like: str) -> Floats:
        """The tokens that count, row after row [tokens], in float64.

        Raises:
            UsageError: `values` are laid out otherwise than the array called `like`.
        """
        rows = _rows(values, name)
        lengths = [row.size for row in rows]
        if lengths != self.row_lengths.tolist():
            raise UsageError(
                f"{name} is {_shape(lengths)} and {like} is {_shape(self.row_lengths.tolist())}: give both for the "
                "same tokens"
            )
        return np.asarray(np.concatenate([*rows, np.zeros(0)])[self.counted], dtype=np.float64)

    def log_probs(self, values: ArrayLike, name: str, like: str) -> Floats:
        """As `flat`.

        Raises:
            UsageError: also where they are probabilities.
        """
        flat = self.flat(values, name, like)
        if flat.size and flat.min() >= 0 and 0 < flat.max() <= 1:
            raise UsageError(f"{name} lies between 0 and 1, as probabilities do: give their natural logarithms")
        return flat

    def groups(self, values: ArrayLike, name: str) -> Ints:
        """The number of each row's group, from 0 [B]: rows with one value, or with the same list of values, belong
        together.

        Raises:
            UsageError: there are more or fewer than one for each row.
        """
        if isinstance(values, list | tuple):
            self._require_one_each(len(values), name)
            rows = [to_numpy(value, name) for value in values]
        else:
            rows = list(np.atleast_1d(to_numpy(values, name)))
            self._require_one_each(len(rows), name)
        numbers: dict[object, int] = {}
        keys = [_key(tuple(np.ravel(row).tolist())) for row in rows]
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    def of_rows(self, values: ArrayLike, name: str) -> Array:
        """One value a row [B].

        Raises:
            UsageError: there are more or fewer.
        """
        array = flat_values(values, name)
        self._require_one_each(array.size, name)
        return array

    def flags(self, values: ArrayLike, name: str) -> Mask:
        """Yes or no of each row [B].

        Raises:
            UsageError: there are more or fewer, or one is neither true nor false, 1 nor 0.
        """
        given = as_numbers(self.of_rows(values, name))
        if not np.isin(given, (0.0, 1.0)).all():
            raise UsageError(f"{name} holds something besides true and false: give true or false for each response")
        return np.asarray(given == 1)

    def _require_one_each(self, number: int, name: str) -> None:
        if number != len(self.row_lengths):
            raise UsageError(f"{name} has {number} values for {len(self.row_lengths)} responses: give one each")


def is_unrecorded(log_probs: Floats) -> bool:
    """Whether zeros stand for log-probs that nothing recorded: so many tokens are never all certain."""
    return log_probs.size >= _ENOUGH_TOKENS and not log_probs.any()


def flat_values(values: ArrayLike, name: str) -> Array:
    """All of them [K]; those of a list each by itself, so that a string among numbers leaves these as they are.

    Raises:
        UsageError: one of them is no array.
    """
    if not isinstance(values, list | tuple):
        return to_numpy(values, name).ravel()
    parts = [to_numpy(value, name).ravel().astype(object) for value in values]
    return np.concatenate([np.zeros(0, dtype=object), *parts])


def as_numbers(values: Array) -> Floats:
    """In float64, with NaN for what is no number [B]."""
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return np.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return np.nan


def _key(row: tuple[object, ...]) -> object:
    """What is equal for equal rows, also for rows of chat messages, which have no hash."""
    try:
        hash(row)
    except TypeError:
        return repr(row)
    return row


def to_numpy(values: ArrayLike, name: str) -> Array:
    """An array of any kind on the host; what is in 16 bit, which numpy may not know, in FP32.

    Raises:
        UsageError: it is none.
    """
    if hasattr(values, "detach"):
        tensor = values.detach().cpu()
        values = tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UsageError(f"{name} is no array: its rows differ in length; give a list of 1-D arrays") from error


def _rows(values: ArrayLike, name: str) -> Sequence[Floats]:
    """Its rows in float64; one row where it is 1-D, none where it is an empty list.

    Raises:
        UsageError: it is no array of numbers.
    """
    if not isinstance(values, list | tuple):
        array = to_numpy(values, name)
        if array.dtype == object and array.ndim == 1:  # such as a column of lists in pandas
            return _rows(array.tolist(), name)
        rows = list(_numbers(array, name)) if array.ndim == 2 else [_numbers(array, name)]
    elif values and (values[0] is None or np.isscalar(values[0])):
        rows = [_numbers(to_numpy(values, name), name)]
    else:
        rows = [_numbers(to_numpy(row, name), name) for row in values]
    if any(row.ndim != 1 for row in rows):
        raise UsageError(f"{name} is no list of responses: give an array [responses, tokens], or a list of 1-D arrays")
    return rows


def _numbers(array: Array, name: str) -> Floats:
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} holds something that is no number: give numbers, NaN where one is absent") from error


def _shape(lengths: Sequence[int]) -> str:
    if not lengths:
        return "empty"
    longest, shortest = max(lengths), min(lengths)
    return f"{len(lengths)} x {longest}" if longest == shortest else f"{len(lengths)} rows of {shortest} to {longest}"
