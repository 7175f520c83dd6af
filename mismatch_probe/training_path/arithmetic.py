"""Products of the CPU as other hardware computes them: 16-bit ones as tensor cores do, FP32 by oneDNN, FP64 throughout.

Definition, for matrices A and B of FP16 or BF16: C = round(sum_k A_ik B_kj), where each product is exact (its 22 or 16
significant bits fit FP32's 24), the sum is accumulated in FP32, a bias is added in FP32, and the result is rounded
once, to the nearest, ties to even. PyTorch's own products of a 16-bit format are several times slower than this on a
CPU without instructions for it, but for those of few rows, where BF16 stays PyTorch's own. On one that has them, BF16
products are PyTorch's own, and so are FP16 matrix products where a trial shows that they follow this definition.
Attention takes FP16 queries, keys and values, is computed in FP32 and rounded once; of BF16, that holds for its
backward pass, whose kernel is slow on short sequences.

FP32 products go to oneDNN instead of MKL, which leaves half of an AMD processor's vector width unused; on Intel's, MKL
is the faster. FP64 goes through model code that asks for FP32 by name. Formats, flags and modes are entered for a
forward pass and left after it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mismatch_probe.dtypes import Dtype

aten = torch.ops.aten

_SCRATCH_ELEMENTS: Final = 4 * 2**20
_ROWS_PER_BLOCK: Final = 1024
_ROW_STEP: Final = 32
_FEWEST_ROWS: Final = 16
"""Of fewer rows PyTorch's own BF16 loops are done before the other matrix is widened to FP32."""
_CPU_INFO: Final = Path("/proc/cpuinfo")
_INTEL: Final = "GenuineIntel"

_ONE_OUTPUT: Final = frozenset(
    {
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten._grouped_mm.default,
    }
)
_MATRIX_PRODUCTS: Final = (aten.mm.default, aten.addmm.default, aten.linear.default)
_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD: Final = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_PRODUCTS: Final = _ONE_OUTPUT | {
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
    aten.bmm.default,
    _ATTENTION,
    _ATTENTION_BACKWARD,
}


class CpuProducts(TorchDispatchMode):
    """While entered, products of FP16, BF16 or FP32 CPU tensors follow this module's definition.

    It acts below autograd and autocast: forward, backward and autocast's casts reach it as the same few operators, in
    every spelling of a product (`linear`, `@`, `einsum`, experts). It changes no other tensors and formats.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        if args[0].dtype == torch.float32 and fp32_by_onednn():
            return _fp32_product(func, args, kwargs)
        if is_16_bit(args[0]) and not _is_native(func, args, kwargs):
            return _16_bit_product(func, args, kwargs)
        return func(*args, **kwargs)


def _is_native(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether PyTorch's own operator computes this product of a 16-bit format; it refuses what has two formats."""
    if func is _ATTENTION_BACKWARD:
        return False
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
    if len(dtypes) > 1:
        return True
    if args[0].dtype == torch.float16:
        return func in _MATRIX_PRODUCTS and not kwargs and native_fp16_follows_the_definition()
    return func is _ATTENTION or has_native_bf16()


def _16_bit_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = args[0].dtype
    if func is aten.mm.default:
        return _16_bit_matmul(*args)
    if func is aten.addmm.default:
        return _16_bit_matmul(args[1], args[2], addend=args[0], **kwargs)
    if func is aten.linear.default and args[1].dim() == 2:
        return _16_bit_linear(*args)
    if func is aten.bmm.default:
        return _16_bit_batched_matmul(*args)
    if func is aten._grouped_mm.default and args[0].dim() == 2 and args[1].dim() == 3:
        return _16_bit_grouped_matmul(*args, **kwargs)
    if func is _ATTENTION:
        output, log_sum_exp = _computed_in_fp32(func, args, kwargs)
        return output.to(dtype), log_sum_exp
    if func is _ATTENTION_BACKWARD:
        return tuple(gradient.to(dtype) for gradient in _computed_in_fp32(func, args, kwargs))
    return _computed_in_fp32(func, args, kwargs).to(dtype)


def _fp32_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.mm.default:
        return _fp32_matmul(*args)
    if func is aten.addmm.default and not kwargs:
        return _fp32_matmul(args[1], args[2]).add_(args[0])
    return func(*args, **kwargs)


def is_16_bit(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def _computed_in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and is_16_bit(value) else value

    return func(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})


def _16_bit_matmul(
    a_MK: torch.Tensor, b_KN: torch.Tensor, *, addend: torch.Tensor | None = None, alpha: float = 1, beta: float = 1
) -> torch.Tensor:
    """round(alpha A B + beta addend) in blocks, in the format of A.

    Blocks bound the FP32 copies, and have few different shapes: oneDNN keeps an object on the heap for each shape, and
    these objects between freed temporaries keep the heap from shrinking.
    """
    (num_rows, depth), num_columns = a_MK.shape, b_KN.shape[1]
    if a_MK.dtype == torch.bfloat16 and num_rows < _FEWEST_ROWS:
        return a_MK @ b_KN if addend is None else torch.addmm(addend, a_MK, b_KN, alpha=alpha, beta=beta)
    addend_MN = None if addend is None or beta == 0 else addend.expand(num_rows, num_columns)
    output_MN = torch.empty(num_rows, num_columns, dtype=a_MK.dtype)
    for columns in _block_slices(num_columns, max(1, _SCRATCH_ELEMENTS // max(depth, 1))):
        b_block = b_KN[:, columns].float()
        for rows in _block_slices(num_rows, _ROWS_PER_BLOCK):
            block = _padded_product(a_MK[rows].float(), b_block)
            if alpha != 1:
                block.mul_(alpha)
            if addend_MN is not None:
                block.add_(addend_MN[rows, columns].float(), alpha=beta)
            output_MN[rows, columns] = block
    return output_MN


def _16_bit_linear(input_XK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`linear`, which inference mode does not decompose."""
    num_columns, depth = weight_NK.shape
    rows_MK = input_XK.reshape(prod(input_XK.shape[:-1]), depth)
    return _16_bit_matmul(rows_MK, weight_NK.t(), addend=bias_N).view(*input_XK.shape[:-1], num_columns)


def _padded_product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """A B, computed with rows of zeros up to a multiple of _ROW_STEP."""
    padded_MK = pad(a_MK, (0, 0, 0, -a_MK.shape[0] % _ROW_STEP))
    return _fp32_matmul(padded_MK, b_KN)[: a_MK.shape[0]]


def _16_bit_batched_matmul(a_BMK: torch.Tensor, b_BKN: torch.Tensor) -> torch.Tensor:
    size, num_rows, num_columns = a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2]
    output_BMN = torch.empty(size, num_rows, num_columns, dtype=a_BMK.dtype)
    largest = max(num_rows * num_columns, a_BMK[:1].numel(), b_BKN[:1].numel(), 1)
    for batch in _block_slices(size, max(1, _SCRATCH_ELEMENTS // largest)):
        output_BMN[batch] = torch.bmm(a_BMK[batch].float(), b_BKN[batch].float())
    return output_BMN


def _16_bit_grouped_matmul(
    a_TK: torch.Tensor,
    b_EKN: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of rows offs[e-1]:offs[e] with matrix e: the experts of a mixture."""
    if bias is not None or out_dtype not in (None, a_TK.dtype):
        product: torch.Tensor = aten._grouped_mm.default(a_TK, b_EKN, offs, bias, out_dtype)
        return product
    output_TN = torch.zeros(a_TK.shape[0], b_EKN.shape[2], dtype=a_TK.dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        output_TN[start:end] = _16_bit_matmul(a_TK[start:end], b_EKN[expert])
        start = end
    return output_TN


def _fp32_matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    if not fp32_by_onednn() or 0 in (*a_MK.shape, b_KN.shape[1]):
        return torch.mm(a_MK, b_KN)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        _contiguous_copy(a_MK), _contiguous_copy(b_KN.t()), None, "none", [], ""
    )
    return product


def _contiguous_copy(matrix: torch.Tensor) -> torch.Tensor:
    """A copy where both strides exceed 1: oneDNN reorders such a matrix 1000 times slower than it multiplies."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _block_slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


@cache
def fp32_by_onednn() -> bool:
    """Whether FP32 products go to oneDNN: PyTorch was built with it, and the processor is not Intel's."""
    return _has_onednn() and not (_CPU_INFO.exists() and _INTEL in _CPU_INFO.read_text())


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def has_native_bf16() -> bool:
    """Whether oneDNN has BF16 products for this processor; PyTorch's own loops are slow where it has none."""
    return _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def native_fp16_follows_the_definition() -> bool:
    """Whether this processor has FP16 products, and they pass a trial: long sums, tiny numbers, a bias.

    The sums of the trial are exact in FP32, so each has one right result; FP16 would lose their small terms.
    """
    if not _has_onednn() or not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return False
    depth = 512
    with _disable_current_modes():
        a_MK = (torch.arange(64 * depth).reshape(64, depth) * 7919 % 81 - 40).half()
        b_KN = (torch.arange(depth * 48).reshape(48, depth).t() * 104729 % 81 - 40).half()
        bias_N = torch.arange(48).half() / 8
        return all(_passes_trial(a_MK * scale, b_KN, bias_N * scale) for scale in (1, 2.0**-6, 2.0**-24))


def _passes_trial(a_MK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor) -> bool:
    exact_MN = a_MK.double() @ b_KN.double()
    with_bias_MN = exact_MN + bias_N.double()
    return torch.equal(torch.mm(a_MK, b_KN), exact_MN.float().half()) and torch.equal(
        torch.addmm(bias_N, a_MK, b_KN), with_bias_MN.float().half()
    )


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
        fp64_kwargs = {name: _to_float64(value) for name, value in (kwargs or {}).items()}
        return func(*map(_to_float64, args), **fp64_kwargs)


def _to_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


_FP32_PRODUCTS: Final = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_MATMUL: Final = {"cpu": "mkldnn.matmul", "cuda": "cuda.matmul"}
"""What says how FP32 products are computed, by device: that of the other device says nothing."""
_REDUCTIONS: Final = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def torch_dtype(dtype: Dtype) -> torch.dtype:
    in_torch: torch.dtype = getattr(torch, dtype.torch_name)
    return in_torch


@contextmanager
def true_fp32() -> Iterator[None]:
    """Compute FP32 products in IEEE FP32: no TF32 on a GPU, no BF16 or TF32 on a CPU. Flags are restored after it."""
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


def product_flags(device_type: str) -> dict[str, Any]:
    """The present global flags that decide how FP32 and 16-bit products are computed on such a device."""
    names = [name for device, name in _MATMUL.items() if device == device_type]
    return {
        **{f"fp32_products_{name}": attrgetter(name)(torch.backends).fp32_precision for name in names},
        **{name: getattr(torch.backends.cuda.matmul, name) for name in _REDUCTIONS},
    }


@dataclass(frozen=True)
class Arithmetic:
    """An arithmetic of forward passes.

    `autocast_dtype` is set where autocast casts each product; `is_reference` demands true FP32 or FP64.
    """

    dtype: Dtype
    device_type: str
    autocast_dtype: torch.dtype | None
    is_reference: bool

    @property
    def defines_cpu_products(self) -> bool:
        """Whether products are those of `CpuProducts`, which replaces no product of FP64."""
        if self.device_type != "cpu":
            return False
        if self.dtype == Dtype.BF16:
            return not has_native_bf16()
        return self.dtype == Dtype.FP16 or (self.dtype == Dtype.FP32 and fp32_by_onednn())

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
