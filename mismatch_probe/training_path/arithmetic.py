"""FP64 arithmetic through model code that asks for FP32 by name.

Which arithmetic a forward pass runs in: formats, flags and modes that are entered for it and left after it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path.products import CpuProducts, fp32_by_onednn


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


_FP32_PRODUCTS: Final = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_MATMUL: Final = ("cuda.matmul", "mkldnn.matmul")
_REDUCTIONS: Final = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def torch_dtype(dtype: Dtype) -> torch.dtype:
    in_torch: torch.dtype = getattr(torch, dtype.torch_name)
    return in_torch


@contextmanager
def true_fp32() -> Iterator[None]:
    """FP32 products in IEEE FP32: no TF32 on a GPU, no BF16 or TF32 on a CPU; every flag is as before afterwards."""
    backends = attrgetter(*_FP32_PRODUCTS)(torch.backends)
    precisions = [backend.fp32_precision for backend in backends]
    reductions = [getattr(torch.backends.cuda.matmul, name) for name in _REDUCTIONS]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        for name in _REDUCTIONS:
            setattr(torch.backends.cuda.matmul, name, False)
        yield
    finally:
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision
        for name, reduction in zip(_REDUCTIONS, reductions, strict=True):
            setattr(torch.backends.cuda.matmul, name, reduction)


def product_flags() -> dict[str, Any]:
    """The global flags that decide what an FP32 or 16-bit product is, as they are now."""
    return {
        **{f"fp32_products_{name}": attrgetter(name)(torch.backends).fp32_precision for name in _MATMUL},
        **{name: getattr(torch.backends.cuda.matmul, name) for name in _REDUCTIONS},
    }


@dataclass(frozen=True)
class Arithmetic:
    """`autocast_dtype` is set where autocast casts each product; `is_reference` demands true FP32 or FP64."""

    dtype: Dtype
    device_type: str
    autocast_dtype: torch.dtype | None
    is_reference: bool

    @property
    def defines_cpu_products(self) -> bool:
        """Whether products follow `products`; PyTorch's own BF16 and FP64 products need no help."""
        return self.device_type == "cpu" and (
            self.dtype == Dtype.FP16 or (self.dtype == Dtype.FP32 and fp32_by_onednn())
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter it for forward passes without gradients in this thread."""
        with self.flags_set(), self.active_in_thread():
            yield

    @contextmanager
    def flags_set(self) -> Iterator[None]:
        """The part of `active` that concerns every thread of the process; enter it in one."""
        with true_fp32() if self.is_reference else nullcontext():
            yield

    @contextmanager
    def active_in_thread(self) -> Iterator[None]:
        """The part of `active` that each thread enters for itself, inside `flags_set`."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.dtype == Dtype.FP64:
                stack.enter_context(Float64Throughout())
            if self.autocast_dtype is not None:
                stack.enter_context(torch.autocast(self.device_type, dtype=self.autocast_dtype))
            if self.defines_cpu_products:
                stack.enter_context(CpuProducts())
            yield
