"""Arrays of a caller's own code: padded [B, T] with a mask, a list of rows, or tensors of any library."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.stats.sequences import Array, Floats, Ints, Mask, Reals

ENOUGH_TOKENS: Final = 16
"""So many tokens are never all certain."""


class SupportsArray(Protocol):
    """What numpy reads: an array of numpy, masked or not, of pandas or JAX, or a tensor on the CPU."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


class Tensor(Protocol):
    """A tensor of PyTorch on any device, nested or not."""

    def detach(self) -> Any: ...


Numbers: TypeAlias = SupportsArray | Tensor | Sequence[float | None]
ArrayLike: TypeAlias = Numbers | Sequence[SupportsArray] | Sequence[Tensor] | Sequence[Sequence[float | None]]
"""Numbers of responses: an array or tensor [B, T] or [B], a list of B rows, or a list of B numbers; None is absent."""
LabelsLike: TypeAlias = SupportsArray | Tensor | Sequence[object]
"""What identifies a prompt: one value, such as a number or a text, or one row of token ids, a response [B]."""


@dataclass(frozen=True)
class Layout:
    """The layout of arrays: the length of each row, and the mask of the places that count [places]."""

    row_lengths: Ints
    is_counted: Mask

    @classmethod
    def of(cls, values: ArrayLike, mask: ArrayLike | bool | None, name: str, *others: ArrayLike | None) -> "Layout":
        """Read the layout from one of the arrays, called `name`, and the mask: true or 1 where a token was sampled.

        `True` means every place, and so does None where rows cannot be padded: in a list of rows, or with one row. What
        a numpy masked array hides does not count either: `values`, the mask, or one of `others`, which have the same
        layout.

        Raises:
            UsageError: the mask has another shape, or rows that may be padded have none.
        """
        if isinstance(mask, bool | np.bool_) and mask:
            is_full, mask = True, None
        else:
            is_full = False
        rows = _rows_as_floats(values, name)
        lengths = np.array([row.size for row in rows], dtype=np.int64)
        all_places = cls(lengths, np.ones(lengths.sum(), dtype=np.bool_))
        is_counted = all_places.is_counted
        for maybe_masked in (values, mask, *others):
            is_unmasked = _unmasked_places(maybe_masked)
            if is_unmasked is not None and is_unmasked.size == is_counted.size:  # of another size, `flat` says which
                is_counted, is_full = is_counted & is_unmasked, True
        if mask is None and not is_full and _may_be_padded(values):
            raise UsageError(
                f"{name} is a 2-D array without a mask, so padding would count as tokens: give mask, 1 where a token "
                "was sampled, or mask=True where every row is full; a list of rows needs none"
            )
        if mask is not None:
            mask_values = all_places.flat(mask, "mask", name)
            if not np.isin(mask_values[is_counted], (0.0, 1.0)).all():
                raise UsageError("mask holds something besides 0 and 1: give 1 where a token was sampled, else 0")
            is_counted = is_counted & (mask_values == 1)
        return cls(lengths, is_counted)

    @property
    def lengths(self) -> Ints:
        """The number of counted tokens of each row [B]."""
        ends = np.cumsum(self.row_lengths)
        num_before = np.concatenate([[0], np.cumsum(self.is_counted)])
        return np.asarray(num_before[ends] - num_before[ends - self.row_lengths], dtype=np.int64)

    def flat(self, values: ArrayLike | bool, name: str, like: str) -> Floats:
        """The values of the counted tokens, row after row [tokens], in float64.

        Raises:
            UsageError: `values` have another layout than the array called `like`.
        """
        rows = _rows_as_floats(values, name)
        lengths = [row.size for row in rows]
        if lengths != self.row_lengths.tolist():
            raise UsageError(
                f"{name} is {_shape_text(lengths)} and {like} is {_shape_text(self.row_lengths.tolist())}: give both "
                "for the same tokens"
            )
        return np.asarray(np.concatenate([*rows, np.zeros(0)])[self.is_counted], dtype=np.float64)

    def log_probs(self, values: ArrayLike, name: str, like: str) -> Floats:
        """`flat` for log-probs.

        Raises:
            UsageError: as `flat`, and where the values are probabilities.
        """
        flat = self.flat(values, name, like)
        if flat.size and flat.min() >= 0 and 0 < flat.max() <= 1:
            raise UsageError(f"{name} lies between 0 and 1, as probabilities do: give their natural logarithms")
        return flat

    def groups(self, values: LabelsLike, name: str) -> Ints:
        """The number of each row's group, from 0 [B]: rows with the same value, or list of values, are one group.

        Raises:
            UsageError: there are more or fewer than one for each row, or one is None, NaN or a mapping.
        """
        values = _rows_of_nested(values)
        if isinstance(values, list | tuple):
            self._require_one_each(len(values), name)
            rows = [to_numpy(value, name) for value in values]
        else:
            rows = list(np.atleast_1d(to_numpy(values, name)))
            self._require_one_each(len(rows), name)
        numbers: dict[object, int] = {}
        keys = []
        for row in rows:
            parts = tuple(np.ravel(row).tolist())
            is_mapping = np.ndim(row) == 0 and isinstance(parts[0], dict)
            if is_mapping or any(_is_absent(part) or _is_nan(part) for part in parts):
                raise UsageError(
                    f"{name} holds {parts[0]!r:.60}, which names no prompt: give one value, or one row of token ids, "
                    "for each response"
                )
            keys.append(_hashable_row(parts))
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    def of_rows(self, values: ArrayLike, name: str) -> Array:
        """One value for each row [B].

        Raises:
            UsageError: the number of values is not the number of rows.
        """
        array = flat_values(values, name)
        self._require_one_each(array.size, name)
        return array

    def flags(self, values: ArrayLike, name: str) -> Mask:
        """A flag for each row [B].

        Raises:
            UsageError: the number of flags is not the number of rows, or one is neither true nor false, 1 nor 0.
        """
        numbers = as_numbers(self.of_rows(values, name))
        if not np.isin(numbers, (0.0, 1.0)).all():
            raise UsageError(f"{name} holds something besides true and false: give true or false for each response")
        return np.asarray(numbers == 1)

    def _require_one_each(self, number: int, name: str) -> None:
        if number != len(self.row_lengths):
            raise UsageError(f"{name} has {number} values for {len(self.row_lengths)} responses: give one each")


def is_unrecorded(log_probs: Reals) -> bool:
    """Whether the log-probs are zeros that stand for missing ones: so many tokens are never all certain."""
    return log_probs.size >= ENOUGH_TOKENS and not log_probs.any()


def flat_values(values: Any, name: str) -> Array:
    """All values as one array [K]; a string in a list leaves the numbers in it unchanged.

    Raises:
        UsageError: an element is not an array.
    """
    values = _rows_of_nested(values)
    if not isinstance(values, list | tuple):
        return to_numpy(values, name).ravel()
    parts = [to_numpy(value, name).ravel().astype(object) for value in values]
    return np.concatenate([np.zeros(0, dtype=object), *parts])


def as_numbers(values: Array) -> Floats:
    """The values in float64 [B], with NaN for what is not a number."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    return np.array([_float_or_nan(value) for value in values], dtype=np.float64)


def _float_or_nan(value: Any) -> float:
    try:
        return np.nan if isinstance(value, str | bytes) or np.iscomplexobj(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _hashable_row(row: tuple[object, ...]) -> object:
    """A key that is equal for equal rows, also for rows of chat messages, which have no hash."""
    try:
        hash(row)
    except TypeError:
        return repr(row)
    return row


def to_numpy(values: Any, name: str) -> Array:
    """An array of any kind as a numpy array; 16-bit formats, which numpy may not have, become FP32.

    What a masked array hides is None, or NaN among floating-point numbers.

    Raises:
        UsageError: it cannot become an array.
    """
    if isinstance(values, np.ma.MaskedArray):
        absent: Any = np.nan if values.dtype.kind == "f" else None
        return np.where(values.mask, absent, values.data)
    try:
        if hasattr(values, "detach"):
            tensor = values.detach().cpu()
            values = tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
        return np.asarray(values)
    except ValueError as error:
        raise UsageError(f"{name} is no array: its rows differ in length; give a list of 1-D arrays") from error
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"{name} is no dense array ({message_of(error)}): give a dense one, and a mask beside it"
        ) from error


def _rows_of_nested(values: Any) -> Any:
    """The rows of a nested tensor of PyTorch; anything else is unchanged."""
    return list(values.unbind()) if getattr(values, "is_nested", False) is True else values


def _unmasked_places(values: Any) -> Mask | None:
    """The mask of the values that masked arrays do not hide [places]; None where no array is masked."""
    parts = values if isinstance(values, list | tuple) else [values]
    if not any(isinstance(part, np.ma.MaskedArray) for part in parts):
        return None
    return np.concatenate(
        [
            ~np.broadcast_to(part.mask, part.shape).ravel()
            if isinstance(part, np.ma.MaskedArray)
            else np.ones(np.size(to_numpy(part, "")), dtype=np.bool_)
            for part in parts
        ]
    )


def _rows_as_floats(values: Any, name: str) -> Sequence[Floats]:
    """The rows in float64: one row of a 1-D array, none of an empty list.

    Raises:
        UsageError: the values are not an array of numbers.
    """
    values = _rows_of_nested(values)
    if not isinstance(values, list | tuple):
        array = to_numpy(values, name)
        if array.dtype == object and array.ndim == 1:  # such as a column of lists in pandas
            return _rows_as_floats(array.tolist(), name)
        rows = list(_floats_of(array, name)) if array.ndim == 2 else [_floats_of(array, name)]
    elif values and (np.isscalar(values[0]) or _is_absent(values[0])):
        rows = [_floats_of(np.array([None if _is_absent(value) else value for value in values], dtype=object), name)]
    else:
        rows = [_floats_of(to_numpy(row, name), name) for row in values]
    if any(row.ndim != 1 for row in rows):
        raise UsageError(f"{name} is no list of responses: give an array [responses, tokens], or a list of 1-D arrays")
    return rows


def _is_absent(value: Any) -> bool:
    """Whether a value means absent: None, pandas' NA, or numpy's `masked`."""
    pandas: Any = sys.modules.get("pandas")
    return value is None or value is np.ma.masked or (pandas is not None and value is pandas.NA)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating | np.datetime64) and bool(value != value)


def _may_be_padded(values: Any) -> bool:
    """Whether the values are an array [B, T] of several rows, where padding cannot be recognised."""
    is_list = isinstance(values, list | tuple) or getattr(values, "is_nested", False) is True
    return not is_list and getattr(values, "ndim", 0) == 2 and len(values) > 1


def _floats_of(array: Array, name: str) -> Floats:
    if array.dtype == object:
        array = np.where(np.asarray(np.frompyfunc(_is_absent, 1, 1)(array), dtype=np.bool_), np.nan, array)
    if array.dtype.kind in "SUmM" or (array.dtype == object and any(isinstance(item, str) for item in array.flat)):
        raise UsageError(f"{name} holds something that is no number: give numbers, NaN where one is absent")
    if array.dtype.kind == "c":
        raise UsageError(f"{name} holds complex numbers: give real ones, NaN where one is absent")
    try:
        return array.astype(np.float64)
    except OverflowError as error:
        raise UsageError(f"{name} holds a number too large for a float: give NaN where one is absent") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} holds something that is no number: give numbers, NaN where one is absent") from error


def _shape_text(lengths: Sequence[int]) -> str:
    if not lengths:
        return "empty"
    longest, shortest = max(lengths), min(lengths)
    return f"{len(lengths)} x {longest}" if longest == shortest else f"{len(lengths)} rows of {shortest} to {longest}"
