"""The ranges of activations, observed while a model computes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mismatch_probe.dtypes import FP16_FLUSHED_EXPONENT, FP16_SMALLEST_NORMAL_EXPONENT

_MOVES_VALUES: Final = frozenset(
    {"cat", "clone", "contiguous", "dropout", "masked_fill", "reshape", "stack", "tensor", "where"}
)
"""Operations whose results hold no new magnitude; masks are made by some of them."""


class Operation(NamedTuple):
    """The `number`-th call of a function, from 0, among those of one module in one forward pass."""

    module: str
    function: str
    number: int

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.function}{f' {self.number + 1}' if self.number else ''})"


See = Callable[[Operation, torch.Tensor], None]


class OperationWatch(TorchFunctionMode):
    """While entered, `see` receives every floating-point result of the model's own code, in the order of execution.

    Operations have the same names in every format, because it is the same code that calls them. A softmax is seen as
    `softmax` and, before it, its input as `softmax input` without the positions that a mask removes.
    """

    def __init__(self, model: torch.nn.Module, see: See) -> None:
        super().__init__()
        self._model = model
        self._see = see
        self._inside: list[str] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside and isinstance(result, torch.Tensor) and result.is_floating_point():
            name = getattr(func, "__name__", str(func))
            if name == "softmax":
                self._tell("softmax input", _without_mask(args[0]))
            moves = name in _MOVES_VALUES or (result._is_view() and name != "to")
            if not moves and not _adds_mask(name, args):
                self._tell(name, result)
        return result

    def _tell(self, name: str, value: torch.Tensor) -> None:
        module = self._inside[-1]
        self._see(Operation(module, name, self._calls[module, name]), value)
        self._calls[module, name] += 1

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            if not self._inside:
                self._calls.clear()
            self._inside.append(name)

        return enter

    def _leaving(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


def _adds_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an addition is that of an attention mask, whose lowest numbers are marks and no magnitudes."""
    mask = args[1] if name == "add" and len(args) > 1 else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    return bool(mask.min() <= torch.finfo(mask.dtype).min / 2)


def _without_mask(scores: torch.Tensor) -> torch.Tensor:
    """Scores with 0 where a mask was added."""
    values = scores.detach()
    return values.masked_fill(values <= torch.finfo(values.dtype).min / 2, 0)


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

    def flushed_share(self, exponent: int) -> float:
        """The share of the values that are not zero and would be, times 2^exponent, in FP16."""
        return self._share(-_NUM_BINS, FP16_FLUSHED_EXPONENT - exponent)

    def subnormal(self, exponent: int) -> float:
        """The share of the values that are not zero which, times 2^exponent, keep fewer than FP16's 11 bits."""
        return self._share(FP16_FLUSHED_EXPONENT - exponent, FP16_SMALLEST_NORMAL_EXPONENT - exponent)

    def _share(self, exponent_above: int, up_to: int) -> float:
        return self._between(exponent_above, up_to) / max(1, self.num_nonzero)

    def _between(self, exponent_above: int, up_to: int) -> int:
        """Values in (2^above, 2^up_to], zero never counted."""
        if self._counts is None:
            return 0
        first, last = (min(max(exponent + _BIN_OF_ONE, 0), _NUM_BINS - 1) for exponent in (exponent_above, up_to))
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
    old = largest.get(operation)
    largest[operation] = value if old is None else torch.maximum(old, value)
