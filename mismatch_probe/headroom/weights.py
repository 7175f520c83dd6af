"""What FP16 would make of every stored weight, read from the files a slice at a time: memory stays bounded."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from mismatch_probe.dtypes import FP16_LOSSY, FP16_ROUNDS_TO_INFINITY, FP16_SMALLEST_NORMAL_EXPONENT, Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.headroom.ranges import largest_magnitude, squared_norm
from mismatch_probe.provenance.checkpoint import read_config, weight_files
from mismatch_probe.records.headroom import WeightFindings, WeightRange
from mismatch_probe.training_path.fit import measure_weight_cast

_SLICE_VALUES: Final = 2**22
_NUM_WORST: Final = 8
_STORED: Final = {dtype.upper().replace("FP", "F"): dtype for dtype in Dtype}
"""By the names that safetensors has."""
_TINY: Final = 1e-15
"""Squares of smaller weights would be lost in FP32."""
_NO_WEIGHTS: Final = ("I", "U", "BOOL")
"""Positions and masks, or packed weights where the config says that the checkpoint is quantised."""


@dataclass
class _Totals:
    """What `measure_weight_cast` does not count, of the slices that pass through."""

    largest: float = 0.0
    num_nonfinite: int = 0
    num_subnormal: int = 0
    squares: float = 0.0
    squared_errors: float = 0.0

    def passing(self, slices: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for weights in slices:
            if weights.numel():
                self._add(weights.to(torch.promote_types(weights.dtype, torch.float32)))
            yield weights

    def merge(self, other: "_Totals") -> None:
        self.largest = max(self.largest, other.largest)
        self.num_nonfinite += other.num_nonfinite
        self.num_subnormal += other.num_subnormal
        self.squares += other.squares
        self.squared_errors += other.squared_errors

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.squared_errors / self.squares) if self.squares else 0.0

    def _add(self, weights: torch.Tensor) -> None:
        if not bool(largest_magnitude(weights).isfinite()):
            finite = weights.isfinite()
            self.num_nonfinite += int(torch.count_nonzero(~finite))
            weights = weights[finite]
        if not weights.numel():
            return
        largest = float(largest_magnitude(weights))
        self.largest = max(self.largest, largest)
        if largest < _TINY:
            weights = weights.double()
        fp16_values = weights.half().to(weights.dtype)
        num_normal = torch.count_nonzero(fp16_values.abs() >= 2.0**FP16_SMALLEST_NORMAL_EXPONENT)
        self.num_subnormal += int(torch.count_nonzero(fp16_values) - num_normal)
        if largest >= FP16_ROUNDS_TO_INFINITY:
            is_finite = fp16_values.isfinite()
            weights, fp16_values = weights[is_finite], fp16_values[is_finite]
        self.squares += float(squared_norm(weights))
        self.squared_errors += float(squared_norm(fp16_values - weights))


def scan_weights(folder: Path, tell: Callable[[str], None] = lambda how_far: None) -> WeightFindings:
    """Every floating-point tensor of a checkpoint's safetensors files, rounded to FP16 to nearest even.

    `tell` receives how far that is.

    Raises:
        UsageError: there are no intact safetensors files, none with floating-point weights, or a tensor is stored in a
            quantised format.
    """
    sums = _Totals()
    ranges: list[WeightRange] = []
    paths = weight_files(folder)
    for number, path in enumerate(paths, 1):
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            for place, name in enumerate(names, 1):
                tell(f"tensor {place} of {len(names)}, file {number} of {len(paths)}")
                slices = tensors.get_slice(name)
                code = slices.get_dtype()
                is_integer = code.startswith(_NO_WEIGHTS)
                if is_integer and not read_config(folder).get("quantization_config"):
                    continue
                if code not in _STORED:
                    raise UsageError(
                        f"tensor {name} of {path} is stored as {code}, a quantised format whose values only its own "
                        "kernels know; give --model the checkpoint in bf16, fp16 or fp32"
                    )
                ranges.append(_scan_tensor(name, _STORED[code], _slices(slices), sums))
    if not ranges:
        raise UsageError(f"{folder} holds no floating-point weights; give --model the checkpoint in bf16, fp16 or fp32")
    total = _sum(ranges, sums)
    ranges.sort(key=_badness, reverse=True)
    num_listed = max(_NUM_WORST, sum(map(is_unfit, ranges)))
    return WeightFindings(num_tensors=len(ranges), total=total, worst=ranges[:num_listed])


def is_too_small(tensor: WeightRange) -> bool:
    """Whether BF16 would hold a tensor better, because its weights are near FP16's smallest."""
    return tensor.relative_error > FP16_LOSSY


def is_unfit(tensor: WeightRange) -> bool:
    """Whether FP16 cannot hold a tensor, or not as well as BF16 would."""
    return tensor.num_nonfinite > 0 or tensor.num_overflowed > 0 or is_too_small(tensor)


def _scan_tensor(name: str, stored_as: Dtype, slices: Iterator[torch.Tensor], sums: _Totals) -> WeightRange:
    own = _Totals()
    cast = measure_weight_cast(own.passing(slices), Dtype.FP16)
    sums.merge(own)
    return WeightRange(
        tensor=name,
        stored_as=stored_as,
        num_values=cast.num_weights,
        largest=own.largest,
        num_nonfinite=own.num_nonfinite,
        num_overflowed=cast.num_overflowed,
        num_subnormal=own.num_subnormal,
        num_flushed=cast.num_flushed,
        relative_error=own.relative_error,
    )


def _sum(ranges: list[WeightRange], sums: _Totals) -> WeightRange:
    def sum_of(field: str) -> int:
        return sum(getattr(tensor, field) for tensor in ranges)

    return WeightRange(
        tensor="all",
        stored_as="/".join(sorted({tensor.stored_as for tensor in ranges})),
        num_values=sum_of("num_values"),
        largest=sums.largest,
        num_nonfinite=sums.num_nonfinite,
        num_overflowed=sum_of("num_overflowed"),
        num_subnormal=sums.num_subnormal,
        num_flushed=sum_of("num_flushed"),
        relative_error=sums.relative_error,
    )


def _badness(tensor: WeightRange) -> tuple[float, ...]:
    flushed_share = tensor.num_flushed / max(tensor.num_values, 1)
    return (
        tensor.num_nonfinite,
        tensor.num_overflowed,
        is_too_small(tensor),
        flushed_share,
        tensor.relative_error,
        tensor.largest,
    )


def _slices(tensor: Any) -> Iterator[torch.Tensor]:
    """A tensor in blocks of whole rows with about _SLICE_VALUES values."""
    shape = tensor.get_shape()
    if len(shape) < 2:
        yield tensor[...]
        return
    rows = max(1, _SLICE_VALUES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield tensor[start : start + rows]
