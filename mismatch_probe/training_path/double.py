"""FP64 arithmetic through model code that asks for FP32 by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """While entered, float32 means float64.

    Model code computes norms, rotary angles, attention softmax and router probabilities in float32 whatever the format
    of its weights (`x.float()`, `softmax(..., dtype=torch.float32)`); for an FP64 model that would be rounding.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
