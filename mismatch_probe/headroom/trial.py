# mypy: allow-untyped-calls
# ruff: noqa: N803, N806, N815 - shape suffixes
"""A 16-bit run over the responses, held against FP32: is it finite, how close is it, and which loss scales fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.headroom import models
from mismatch_probe.headroom.passes import look_forward, try_backward
from mismatch_probe.headroom.ranges import ForwardRanges, Operation
from mismatch_probe.headroom.responses import BatchedResponses
from mismatch_probe.records.headroom import ScaleTrial, Trial

EXPONENTS: Final = tuple(range(25))
_NEAR_THE_BEST: Final = 1.25
_NEGLIGIBLE_NATS: Final = 1e-5
_MOST: Final = 0.5
_FAR: Final = 8.0


@dataclass(frozen=True)
class TrialRun:
    """A trial, its forward ranges, its first operation, in the order of execution, whose result is not finite, and how
    far its log-probs lie from FP32's, nats [T].
    """

    trial: Trial
    ranges: ForwardRanges
    first_nonfinite: Operation | None
    errors_T: torch.Tensor


@dataclass(frozen=True)
class Bench:
    """What every trial is held against: the FP32 model and its log-probs [T] of the responses."""

    folder: Path
    settings: HeadroomSettings
    reference: PreTrainedModel
    workload: BatchedResponses
    logprobs_T: torch.Tensor

    def run(
        self,
        dtype: Dtype,
        *,
        modules: Sequence[str] = (),
        residual_from: str | None = None,
        exponents: Sequence[int] = EXPONENTS,
        yardstick: TrialRun | None = None,
        tell: Callable[[str], None],
    ) -> TrialRun:
        """Load the model in `dtype` with some modules, and the residual stream from a layer on, in FP32, and try it.

        `yardstick` is what a loss scale's gradient and the log-probs have to match, BF16. The backward passes are left
        out where the forward pass is not finite.
        """
        model = models.load(self.folder, dtype, self.settings)
        if modules or residual_from:
            models.raise_to_fp32(model, self.reference, modules, residual_from)
        ranges, tried_T = look_forward(model, self.workload, (), tell)
        errors_T = (tried_T.double() - self.logprobs_T.double()).abs()
        error = _finite(float(errors_T.square().mean().sqrt()))
        scales = [] if error is None else try_backward(model, self.reference, self.workload, exponents, tell)
        low, high = scales_that_fit(scales, None if yardstick is None else yardstick.trial)
        first = _first_nonfinite(ranges)
        trial = Trial(
            dtype=dtype,
            modules_in_fp32=list(modules),
            residual_in_fp32_from=residual_from,
            first_nonfinite=None if first is None else str(first),
            logprob_error_nats=error,
            further_share=None if error is None or yardstick is None else _further_share(errors_T, yardstick.errors_T),
            scales=scales,
            from_exponent=low,
            to_exponent=high,
        )
        return TrialRun(trial, ranges, first, errors_T)


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _further_share(errors_T: torch.Tensor, yardstick_T: torch.Tensor) -> float:
    """Of the tokens where either is off by more than FP32's own rounding explains."""
    off_T = torch.maximum(errors_T, yardstick_T) > _NEGLIGIBLE_NATS
    return float((errors_T > yardstick_T)[off_T].double().mean()) if bool(off_T.any()) else 0.0


def _first_nonfinite(ranges: ForwardRanges) -> Operation | None:
    return next((operation for operation, value in ranges.largest().items() if not math.isfinite(value)), None)


def scales_that_fit(scales: Sequence[ScaleTrial], yardstick: Trial | None) -> tuple[int | None, int | None]:
    """The range of exponents around the most accurate one whose gradients are finite and nearly as accurate.

    Nearly: within 1.25 of its error. None fits where even that one is further from FP32 than the yardstick.
    """
    errors = {scale.exponent: scale.relative_error for scale in scales if scale.relative_error is not None}
    if not errors:
        return None, None
    best = min(errors, key=errors.__getitem__)
    limit = None if yardstick is None else yardstick.gradient_error
    if limit is not None and errors[best] > limit:
        return None, None
    low = high = best
    while errors.get(low - 1, math.inf) <= _NEAR_THE_BEST * errors[best]:
        low -= 1
    while errors.get(high + 1, math.inf) <= _NEAR_THE_BEST * errors[best]:
        high += 1
    return low, high


def fits(trial: Trial, yardstick: Trial) -> bool:
    """Everything finite, a loss scale that fits, and log-probs at least as close to FP32 as the yardstick's."""
    return trial.first_nonfinite is None and trial.from_exponent is not None and is_close(trial, yardstick)


def is_close(trial: Trial, yardstick: Trial) -> bool:
    """Log-probs that are finite and no further from FP32 than the yardstick's, or than FP32's own rounding explains.

    The root mean square of a few hundred tokens can hang on one where the yardstick was lucky; so it counts as further
    only where most tokens are, or by far.
    """
    error, limit = trial.logprob_error_nats, yardstick.logprob_error_nats
    if error is None or limit is None:
        return error is not None
    if error <= max(limit, _NEGLIGIBLE_NATS):
        return True
    return trial.further_share is not None and trial.further_share <= _MOST and error <= _FAR * limit
