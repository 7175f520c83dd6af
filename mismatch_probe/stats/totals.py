"""Sums and extremes over a part of the data: parts can be sent as one array and added up elsewhere."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, ClassVar, Final, Self

import numpy as np

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.stats.sequences import Floats

_EXTREMES: Final[dict[str, Callable[[Any, Any], Any]]] = {"highest": max, "lowest": min}


@dataclass(frozen=True)
class AddableTotals:
    """Numbers of one part of the data.

    A field is a float or another `AddableTotals`. The names of extremes begin with `highest_` or `lowest_`; every other
    field is a sum.
    """

    counts: ClassVar[tuple[str, ...]] = ()
    """The fields that are whole numbers."""
    signed_sums: ClassVar[tuple[str, ...]] = ()
    """The fields that may be below 0, if only by rounding."""

    def __add__(self, other: Self) -> Self:
        """The totals of both parts."""
        return type(self)(
            **{
                field.name: _EXTREMES.get(field.name.split("_")[0], operator.add)(
                    getattr(self, field.name), getattr(other, field.name)
                )
                for field in fields(self)
            }
        )

    def impossible(self) -> str | None:
        """The first impossible number, in words such as `departure.tokens is NaN`; None where all are possible."""
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if isinstance(value, AddableTotals):
                of_part = value.impossible()
                if of_part is not None:
                    return f"{name}.{of_part}"
            elif math.isnan(value):
                return f"{name} is NaN"
            elif name in self.counts and not (value >= 0 and float(value).is_integer()):
                return f"{name} is {value:g}, which is no count"
            elif value < 0 and name not in self.signed_sums and name.split("_")[0] not in _EXTREMES:
                return f"{name} is {value:g}, which cannot be below 0"
        return None

    def to_array(self) -> Floats:
        """Every number [K], float64, in the order of the fields; none of them is NaN."""
        return np.fromiter(self._all_numbers(), dtype=np.float64)

    @classmethod
    def of_array(cls, array: Floats) -> Self:
        """The totals of an array [K] that `to_array` gave.

        Raises:
            UsageError: it is not an array of numbers, or has another length.
        """
        try:
            numbers_of_part = np.asarray(array)
            if numbers_of_part.dtype.kind == "c":
                raise TypeError("it holds complex numbers")
            row = numbers_of_part.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{cls.__name__} of a part is no row ({message_of(error)}): give what to_array gave"
            ) from error
        if row.ndim != 1:
            raise UsageError(f"{cls.__name__} of a part is an array of {row.ndim} dimensions: give what to_array gave")
        numbers = iter(row.tolist())
        try:
            totals = cls._from_numbers(numbers)
        except StopIteration:
            raise UsageError(f"{cls.__name__} has more than the {len(row)} numbers given") from None
        if next(numbers, None) is not None:
            raise UsageError(f"{cls.__name__} has fewer than the {len(row)} numbers given")
        return totals

    @classmethod
    def of_arrays(cls, arrays: Iterable[Floats]) -> Self:
        """The sum of the arrays that several parts gave, [R, K] or R arrays [K].

        Raises:
            UsageError: as `of_array`, or there is no part.
        """
        is_one = not isinstance(arrays, Iterable) or isinstance(arrays, str | bytes | Mapping)
        if is_one or getattr(arrays, "ndim", 1) == 0:
            raise UsageError(f"{cls.__name__} of parts needs a list of arrays: give what to_array gave for each")
        parts = [cls.of_array(array) for array in arrays]
        if not parts:
            raise UsageError(f"{cls.__name__} of no part: give what to_array gave for each")
        return reduce(operator.add, parts)

    def _all_numbers(self) -> Iterator[float]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, AddableTotals):
                yield from value._all_numbers()
            else:
                yield float(value)

    @classmethod
    def _from_numbers(cls, numbers: Iterator[float]) -> Self:
        nothing = cls()
        return cls(
            **{
                field.name: type(default)._from_numbers(numbers)
                if isinstance(default, AddableTotals)
                else next(numbers)
                for field in fields(cls)
                for default in (getattr(nothing, field.name),)
            }
        )
