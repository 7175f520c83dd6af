# mypy: allow-untyped-calls
"""Every operation of a model's forward pass, with the module it happens in."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

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
    """While entered, `see` is told every floating-point result of the model's own code, in the order of execution.

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
                self._tell("softmax input", _unmasked(args[0]))
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


def _unmasked(scores: torch.Tensor) -> torch.Tensor:
    """Scores with 0 where a mask was added."""
    detached = scores.detach()
    return detached.masked_fill(detached <= torch.finfo(detached.dtype).min / 2, 0)
