"""A row of a log, whose columns are asked for by name and are what they should be, or are refused with their place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import UsageError
from mismatch_probe.reading import storable
from mismatch_probe.records.sequences import FloatArray, IntArray

_LARGEST_ID: Final = 2**31 - 1
_LARGEST_STEP: Final = 2**53
_LONGEST_TEXT: Final = 4096
_ADVICE: Final = "mend or remove the row"


@dataclass(frozen=True)
class Row:
    """A row's columns and where it stands (`line 3 of FILE`). Each reader of a column raises a UsageError.

    A column that is absent and one that is null are the same.
    """

    where: str
    columns: Mapping[str, Any]

    def has(self, column: str) -> bool:
        return self.columns.get(column) is not None

    def ids(self, column: str) -> IntArray:
        """Token ids, [T]."""
        array = self._list(column)
        if not array.size:
            return np.zeros(0, np.int32)
        kind = array.dtype.kind
        if kind not in "iu" or array.astype(f"{kind}8", copy=False).view(np.uint64).max() > _LARGEST_ID:
            raise self.refusal(f"{column} is no list of token ids, which are whole numbers from 0 on")
        return array.astype(np.int32)

    def numbers(self, column: str, length: int) -> FloatArray:
        """Numbers, [length]; null is NaN."""
        array = self._list(column, length)
        if array.dtype.kind == "O":
            if not all(value is None or type(value) in (int, float) for value in array):
                raise self.refusal(f"{column} is no list of numbers")
            return np.array([np.nan if value is None else value for value in array], np.float64)
        if array.size and array.dtype.kind not in "iuf":
            raise self.refusal(f"{column} is no list of numbers")
        return array if array.dtype == np.float32 else array.astype(np.float64)

    def optional_numbers(self, column: str, length: int) -> FloatArray | None:
        return self.numbers(column, length) if self.has(column) else None

    def flags(self, column: str, length: int) -> npt.NDArray[np.bool_]:
        """What is true or 1, [length]."""
        array = self._list(column, length)
        if array.size and (array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all()):
            raise self.refusal(f"{column} is no list of 0 and 1")
        return array.astype(np.bool_)

    def flags_or_all(self, column: str, length: int) -> npt.NDArray[np.bool_]:
        """`flags`, and all true where the column is absent."""
        return self.flags(column, length) if self.has(column) else np.ones(length, np.bool_)

    def number(self, column: str) -> float | None:
        value = self._item(column)
        if value is None or (type(value) in (int, float) and np.isfinite(value)):
            return None if value is None else float(value)
        raise self.refusal(f"{column} is no number")

    def whole(self, column: str) -> int | None:
        """A whole number from 0 on."""
        value = self._item(column)
        if value is None or (type(value) is int and 0 <= value < _LARGEST_STEP):
            return value
        raise self.refusal(f"{column} is no whole number from 0 on")

    def text(self, column: str) -> str | None:
        """A text of at most 4,096 characters, or a whole number as one."""
        value = self.columns.get(column)
        if value is None or type(value) in (str, int):
            return None if value is None else storable(self.short(column, str(value)))
        raise self.refusal(f"{column} is neither a text nor a whole number")

    def short(self, column: str, text: str) -> str:
        """`text`, which a column holds and every row may share."""
        if len(text) > _LONGEST_TEXT:
            raise self.refusal(f"{column} is a text of more than {_LONGEST_TEXT:,} characters")
        return text

    def inside(self, column: str) -> Self:
        """The object that stands in a column, as a row."""
        value = self.columns.get(column)
        if not isinstance(value, Mapping):
            raise self.refusal(f"{column} is no object")
        return type(self)(self.where, value)

    def rows(self, column: str) -> list[Self]:
        """The objects that stand in a column, as rows."""
        value = self.columns.get(column)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.refusal(f"{column} is no list of objects")
        return [type(self)(self.where, item) for item in value]

    def refusal(self, reason: str) -> UsageError:
        return UsageError(f"{self.where}: {reason}; {_ADVICE}")

    def _item(self, column: str) -> Any:
        """One value, also where it was saved as a tensor of one."""
        value = self.columns.get(column)
        return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value

    def _list(self, column: str, length: int | None = None) -> npt.NDArray[Any]:
        value = self.columns.get(column)
        if value is None:
            raise self.refusal(f"it has no {column}")
        if not isinstance(value, list | np.ndarray):
            raise self.refusal(f"{column} is no list")
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise self.refusal(f"{column} holds lists of several lengths, or numbers too large") from error
        if array.ndim != 1:
            raise self.refusal(f"{column} is no plain list")
        if length is not None and array.size != length:
            raise self.refusal(f"{column} has {array.size} entries where the tokens are {length}")
        return array
