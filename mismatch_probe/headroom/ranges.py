# mypy: allow-untyped-calls
"""Running ranges of a forward and a backward pass: nothing is kept but maxima and counts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from mismatch_probe.headroom.fp16 import FLUSHED_EXPONENT, SMALLEST_NORMAL_EXPONENT
from mismatch_probe.headroom.watch import Operation

_MAGNITUDE_BITS: Final = 0x7FFFFFFF
_MANTISSA_BITS: Final = 23
_NUM_BINS: Final = 257
_BIN_OF_ONE: Final = 127


class Binades:
    """How many FP32 values lie in each (2^(e-1), 2^e], and the largest magnitude.

    Bins are halves of powers of two open below, so that what rounds to zero, 2^-25 included, is counted exactly.
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None

    def add(self, values: torch.Tensor) -> None:
        """Take in a tensor of any shape and floating-point format."""
        flat = values.detach().float().flatten()
        bins = (((flat.view(torch.int32) & _MAGNITUDE_BITS) - 1) >> _MANTISSA_BITS) + 1
        counts = torch.bincount(bins, minlength=_NUM_BINS)
        largest = largest_magnitude(flat)
        self._counts = counts if self._counts is None else self._counts + counts
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def merge(self, other: "Binades") -> None:
        if other._counts is None or other._largest is None:
            return
        counts, largest = other._counts.cpu(), other._largest.cpu()
        self._counts = counts if self._counts is None else self._counts.cpu() + counts
        self._largest = largest if self._largest is None else torch.maximum(self._largest.cpu(), largest)

    @property
    def largest(self) -> float:
        return 0.0 if self._largest is None else float(self._largest)

    @property
    def num_nonzero(self) -> int:
        return self._between(-_BIN_OF_ONE, _NUM_BINS)

    def flushed(self, exponent: int) -> float:
        """The share of the values that are not zero and would be, times 2^exponent, in FP16."""
        return self._share(-_NUM_BINS, FLUSHED_EXPONENT - exponent)

    def subnormal(self, exponent: int) -> float:
        """The share of the values that are not zero which, times 2^exponent, keep fewer than FP16's 11 bits."""
        return self._share(FLUSHED_EXPONENT - exponent, SMALLEST_NORMAL_EXPONENT - exponent)

    def _share(self, above: int, up_to: int) -> float:
        return self._between(above, up_to) / max(1, self.num_nonzero)

    def _between(self, above: int, up_to: int) -> int:
        """Values in (2^above, 2^up_to], zero never counted."""
        if self._counts is None:
            return 0
        first, last = (min(max(exponent + _BIN_OF_ONE, 0), _NUM_BINS - 1) for exponent in (above, up_to))
        return int(self._counts[first + 1 : last + 1].sum())


@dataclass
class ForwardRanges:
    """The largest magnitude of each operation, in the order of execution, and the format of its result.

    Where a result is FP32, also what rounding it to FP16 would change, as a share of its norm. `channels` holds, of
    each module asked for, the largest magnitude in each channel [D] of its last result.
    """

    watched_channels: frozenset[str] = frozenset()
    formats: dict[Operation, torch.dtype] = field(default_factory=dict)
    _largest: dict[Operation, torch.Tensor] = field(default_factory=dict)
    _channels: dict[Operation, torch.Tensor] = field(default_factory=dict)
    _squares: dict[Operation, torch.Tensor] = field(default_factory=dict)

    def see(self, operation: Operation, result: torch.Tensor) -> None:
        """What `OperationWatch` calls."""
        if not result.numel():
            return
        value = result.detach()
        self.formats[operation] = value.dtype
        _raise_to(self._largest, operation, largest_magnitude(value))
        if value.dtype == torch.float32:
            squares = torch.stack([squared_norm(value.half().float() - value), squared_norm(value)])
            self._squares[operation] = self._squares.get(operation, 0) + squares
        if operation.module in self.watched_channels and value.dim() >= 2:
            _raise_to(self._channels, operation, value.abs().flatten(0, -2).amax(0))

    def largest(self) -> dict[Operation, float]:
        """NaN or infinity where a result was not finite."""
        return {operation: float(value) for operation, value in self._largest.items()}

    def rounding_errors(self) -> dict[Operation, float]:
        """Infinity where a result overflows FP16."""
        sums = {place: squares.tolist() for place, squares in self._squares.items()}
        return {place: math.sqrt(errors / squares) if squares else 0.0 for place, (errors, squares) in sums.items()}

    def channels(self) -> dict[str, torch.Tensor]:
        return {operation.module: value.cpu() for operation, value in self._channels.items()}


@dataclass
class GradientRanges:
    """The binades of the gradient of each operation's result, of the operations asked for."""

    operations: frozenset[Operation]
    binades: dict[Operation, Binades] = field(default_factory=dict)

    def see(self, operation: Operation, result: torch.Tensor) -> None:
        """What `OperationWatch` calls; the gradient is seen in the backward pass."""
        if result.requires_grad and operation in self.operations:
            result.register_hook(partial(self._see_gradient, operation))

    def total(self) -> Binades:
        return merged_binades(self.binades.values())

    def _see_gradient(self, operation: Operation, gradient: torch.Tensor) -> None:
        self.binades.setdefault(operation, Binades()).add(gradient)


def merged_binades(parts: Iterable[Binades]) -> Binades:
    binades = Binades()
    for part in parts:
        binades.merge(part)
    return binades


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """NaN where there is one; not for an empty tensor."""
    largest = values.abs().amax()
    return largest.to(torch.promote_types(largest.dtype, torch.float32))


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """In FP64; of values below 1e-22 in FP32 it is 0."""
    norm: torch.Tensor = values.norm()
    return norm.double().square()


def _raise_to(largest: dict[Operation, torch.Tensor], operation: Operation, value: torch.Tensor) -> None:
    known = largest.get(operation)
    largest[operation] = value if known is None else torch.maximum(known, value)
