"""How fast a machine works, and how long something therefore takes: arithmetic on measured rates alone."""

from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mismatch_probe.dtypes import Dtype

Process = Literal["engine", "training", "server"]


@dataclass(frozen=True)
class Work:
    """What is to be done, as sums: floating-point operations in products with weights and in attention, bytes read from
    memory that no product waits for, small operations that the host hands out one by one, and bytes read from disk.
    """

    matrix_flops: float = 0.0
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    operations: float = 0.0
    disk_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, astuple(self), astuple(other)))

    def times(self, factor: float) -> "Work":
        return Work(*(amount * factor for amount in astuple(self)))

    def shared_by(self, ranks: int) -> "Work":
        """What each of several ranks does: its part of the arithmetic, and every small operation."""
        return replace(self.times(1 / ranks), operations=self.operations)


class Rates(BaseModel):
    """What one side's device sustains in one dtype, measured on it; products include a layer's element-wise work."""

    model_config = ConfigDict(frozen=True)

    process: Process
    dtype: Dtype
    device: str
    matrix_flops_per_second: float
    attention_flops_per_second: float
    memory_bytes_per_second: float
    operation_seconds: float
    disk_bytes_per_second: float

    def seconds(self, work: Work) -> float:
        """One after the other: what overlaps on a device makes this an upper estimate."""
        return (
            work.matrix_flops / self.matrix_flops_per_second
            + work.attention_flops / self.attention_flops_per_second
            + work.memory_bytes / self.memory_bytes_per_second
            + work.operations * self.operation_seconds
            + work.disk_bytes / self.disk_bytes_per_second
        )


class Calibration(BaseModel):
    """What was measured of a machine, and the memory of each device: all of it, and what was free (of the host at
    least, which is `cpu`).
    """

    model_config = ConfigDict(frozen=True)

    rates: list[Rates]
    device_memory_bytes: dict[str, int]
    free_memory_bytes: dict[str, int]

    def has(self, process: Process, dtype: Dtype) -> bool:
        return any((rate.process, rate.dtype) == (process, dtype) for rate in self.rates)

    def rates_of(self, process: Process, dtype: Dtype) -> Rates:
        return next(rate for rate in self.rates if (rate.process, rate.dtype) == (process, dtype))


class Span(BaseModel):
    """A time that is not known exactly: the likely value, and between what it is expected."""

    model_config = ConfigDict(frozen=True)

    low_seconds: float
    likely_seconds: float
    high_seconds: float

    @classmethod
    def within(cls, seconds: float, factor: float) -> "Span":
        return cls(low_seconds=seconds / factor, likely_seconds=seconds, high_seconds=seconds * factor)

    def __add__(self, other: "Span") -> "Span":
        """Of both, one after the other; as if both erred in the same direction, which a slow machine has them do."""
        return Span(
            low_seconds=self.low_seconds + other.low_seconds,
            likely_seconds=self.likely_seconds + other.likely_seconds,
            high_seconds=self.high_seconds + other.high_seconds,
        )

    def less(self, seconds: float) -> "Span":
        """What is left of it after so long."""
        return Span(
            low_seconds=max(self.low_seconds - seconds, 0.0),
            likely_seconds=max(self.likely_seconds - seconds, 0.0),
            high_seconds=max(self.high_seconds - seconds, 0.0),
        )

    def __contains__(self, seconds: float) -> bool:
        return self.low_seconds <= seconds <= self.high_seconds


NO_TIME = Span(low_seconds=0, likely_seconds=0, high_seconds=0)
