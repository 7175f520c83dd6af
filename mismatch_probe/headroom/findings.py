"""What was seen becomes findings: ranges of weights, activations and gradients, and what FP16 makes of them.

Stored weights are read from the files a slice at a time, so that memory stays bounded.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from mismatch_probe.dtypes import (
    FP16_LOSSY,
    FP16_ROUNDS_TO_INFINITY,
    FP16_SMALLEST_NORMAL_EXPONENT,
    Dtype,
    fp16_margin_bits,
)
from mismatch_probe.errors import UsageError
from mismatch_probe.headroom.passes import EXPONENTS, Gradients
from mismatch_probe.headroom.ranges import (
    Binades,
    ForwardRanges,
    Operation,
    largest_magnitude,
    merged_binades,
    squared_norm,
)
from mismatch_probe.headroom.responses import RewardedResponses
from mismatch_probe.provenance.checkpoint import read_config, weight_files
from mismatch_probe.records.examinations import (
    ActivationFindings,
    GradientFindings,
    GradientRange,
    HeldAs,
    LayerRange,
    OperationRange,
    ScaleUnderflow,
    WeightFindings,
    WeightRange,
)
from mismatch_probe.training_path.fit import measure_weight_cast
from mismatch_probe.training_path.inside import fp32_parts

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
        of_file = f" of file {number} of {len(paths)}" if len(paths) > 1 else ""
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            for place, name in enumerate(names, 1):
                tell(f"{place} of {len(names)} tensors{of_file}")
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


_NUM_TIGHTEST: Final = 12
_MLP_NAMES: Final = ("mlp", "expert", "feed_forward", "ffn", "moe")
_HELD_AS: Final[dict[torch.dtype, HeldAs]] = {torch.float16: "fp16"}
"""Every other format a model asks for by name ranges as far as FP32."""


def held_in_fp16(fp16: ForwardRanges) -> frozenset[Operation]:
    """The operations whose results an FP16 run keeps in FP16."""
    return frozenset(operation for operation, dtype in fp16.formats.items() if dtype == torch.float16)


def activation_findings(
    model: PreTrainedModel,
    fp32: ForwardRanges,
    fp16: ForwardRanges,
    responses: RewardedResponses,
    first_nonfinite: str | None,
) -> ActivationFindings:
    """Ranges of the FP32 run, with what the FP16 run made of each operation."""
    largest, errors, in_fp16_run = fp32.largest(), fp32.rounding_errors(), fp16.largest()
    ranges = sorted(
        (
            _operation(
                operation, value, errors.get(operation, 0.0), fp16.formats.get(operation), in_fp16_run.get(operation)
            )
            for operation, value in largest.items()
        ),
        key=_bits_left,
    )
    in_fp16 = [range_ for range_ in ranges if range_.held_as == "fp16"]
    modules: dict[str, OperationRange] = {}
    for operation in in_fp16:
        modules.setdefault(operation.module, operation)
    head = [
        value for place, value in largest.items() if model.get_submodule(place.module) is model.get_output_embeddings()
    ]
    return ActivationFindings(
        num_sequences=len(responses.sequences),
        num_tokens=sum(sequence.num_tokens for sequence in responses.sequences),
        largest_logit=_finite_or_none(max(head, default=math.nan)),
        first_nonfinite=first_nonfinite,
        layers=[_layer(name, largest, fp32.channels().get(name)) for name in fp32_parts.layer_names(model)],
        tightest=in_fp16[:_NUM_TIGHTEST],
        too_small=sorted(filter(_is_too_small, in_fp16), key=_relative_error, reverse=True)[:_NUM_TIGHTEST],
        modules=list(modules.values()),
    )


def gradient_findings(gradients: Gradients, responses: RewardedResponses, objective: str) -> GradientFindings:
    """Ranges of the FP32 gradient, and what each loss scale would leave of it in FP16."""
    parameters, operations = gradients.parameters, gradients.operations.binades
    all_parameters, all_operations = merged_binades(parameters.values()), gradients.operations.total()
    assert gradients.optimizer is not None
    return GradientFindings(
        objective=objective,
        num_responses=len(responses.sequences),
        mean_reward=responses.mean_reward,
        stand_in_rewards=responses.stand_in,
        loss=gradients.loss,
        norm=gradients.norm,
        underflow=[_underflow(exponent, all_parameters, all_operations) for exponent in EXPONENTS],
        parameters=_largest_of(parameters.items()),
        activations=_largest_of((str(operation), binades) for operation, binades in operations.items()),
        optimizer=gradients.optimizer,
    )


def _bits_left(operation: OperationRange) -> float:
    if operation.largest is None:
        return -math.inf
    return math.inf if operation.margin_bits is None else operation.margin_bits


def _relative_error(operation: OperationRange) -> float:
    return 0.0 if operation.relative_error is None else operation.relative_error


def _is_too_small(operation: OperationRange) -> bool:
    return _relative_error(operation) > FP16_LOSSY


def _operation(
    operation: Operation, value: float, error: float, dtype: torch.dtype | None, in_fp16: float | None
) -> OperationRange:
    largest = _finite_or_none(value)
    return OperationRange(
        module=operation.module,
        operation=f"{operation.function} {operation.number + 1}" if operation.number else operation.function,
        held_as="kernel" if dtype is None else _HELD_AS.get(dtype, "fp32"),
        largest=largest,
        margin_bits=None if largest is None else fp16_margin_bits(largest),
        relative_error=_finite_or_none(error),
        finite_in_fp16=None if in_fp16 is None else math.isfinite(in_fp16),
    )


def _layer(name: str, largest: dict[Operation, float], channels: torch.Tensor | None) -> LayerRange:
    inside = {operation: value for operation, value in largest.items() if operation.module.startswith(f"{name}.")}
    attention = {operation.module for operation in inside if operation.function == "softmax input"} & {
        operation.module for operation in inside if operation.function == "matmul"
    }
    residual = _largest(value for operation, value in largest.items() if operation.module == name)
    outlier, ratio = None, None
    if channels is not None and bool(channels.isfinite().all()):
        outlier = int(channels.argmax())
        median = float(channels.median())
        ratio = float(channels.max()) / median if median > 0 else None
    return LayerRange(
        layer=name,
        residual=residual,
        margin_bits=None if residual is None else fp16_margin_bits(residual),
        outlier_ratio=ratio,
        outlier_channel=outlier,
        attention_scores=_largest(
            value
            for operation, value in inside.items()
            if operation.module in attention and operation.function == "matmul" and operation.number == 0
        ),
        attention_logits=_largest(
            value
            for operation, value in inside.items()
            if operation.module in attention and operation.function == "softmax input"
        ),
        mlp_product=_largest(
            value
            for operation, value in inside.items()
            if operation.function == "mul" and any(part in operation.module.rpartition(".")[2] for part in _MLP_NAMES)
        ),
    )


def _underflow(exponent: int, parameters: Binades, operations: Binades) -> ScaleUnderflow:
    largest = max(parameters.largest, operations.largest) * 2.0**exponent
    return ScaleUnderflow(
        exponent=exponent,
        parameters_flushed=parameters.flushed_share(exponent),
        parameters_subnormal=parameters.subnormal(exponent),
        activations_flushed=operations.flushed_share(exponent),
        activations_subnormal=operations.subnormal(exponent),
        largest_scaled=largest,
        overflows=largest >= FP16_ROUNDS_TO_INFINITY,
    )


def _largest_of(items: Iterable[tuple[str, Binades]]) -> list[GradientRange]:
    largest = sorted(items, key=lambda item: -item[1].largest)[:_NUM_TIGHTEST]
    return [
        GradientRange(
            name=name,
            largest=binades.largest,
            margin_bits=fp16_margin_bits(binades.largest),
            flushed_unscaled=binades.flushed_share(0),
        )
        for name, binades in largest
    ]


def _largest(values: Iterable[float]) -> float | None:
    return _finite_or_none(max(values, default=math.nan))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
