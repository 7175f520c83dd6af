"""From what passes saw to findings: ranges of activations and gradients, and what FP16 makes of them."""

import math
from collections.abc import Iterable
from typing import Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.dtypes import FP16_LOSSY, FP16_ROUNDS_TO_INFINITY, fp16_margin_bits
from mismatch_probe.headroom import models
from mismatch_probe.headroom.passes import EXPONENTS, Gradients
from mismatch_probe.headroom.ranges import Binades, ForwardRanges, Operation, merged_binades
from mismatch_probe.headroom.responses import RewardedResponses
from mismatch_probe.records.headroom import (
    ActivationFindings,
    GradientFindings,
    GradientRange,
    HeldAs,
    LayerRange,
    OperationRange,
    ScaleUnderflow,
)

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
        layers=[_layer(name, largest, fp32.channels().get(name)) for name in models.layer_names(model)],
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
