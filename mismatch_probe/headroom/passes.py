"""Forward and backward passes over the responses: FP32 to look, 16 bits to try against it.

A 16-bit run is compared with FP32: is it finite, how close is it, and which loss scales fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.compare.cost.headroom import (
    LOOK_BACKWARD,
    LOOK_FORWARD,
    Passes,
    PassStarted,
    passes_backward,
)
from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.config.train import OptimizerSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.headroom.ranges import Binades, ForwardRanges, GradientRanges, Operation, OperationWatch
from mismatch_probe.headroom.responses import BatchedResponses, computing
from mismatch_probe.notation import write_many
from mismatch_probe.records.examinations import (
    NO_GRADIENT,
    OptimizerFindings,
    PrecisionTrial,
    ScaleTrial,
    leaves_gradient,
)
from mismatch_probe.training_path.inside import fp32_parts

BatchCallback = Callable[[PassStarted], None]


def look_forward(
    model: PreTrainedModel, workload: BatchedResponses, channels_of: Sequence[str], tell: BatchCallback
) -> tuple[ForwardRanges, torch.Tensor]:
    """Ranges of every operation, and the log-probs of all response tokens in the order of the batches; `tell` receives
    each batch as it begins, here as below.
    """
    ranges = ForwardRanges(frozenset(channels_of))
    with torch.no_grad(), computing(model.device), OperationWatch(model, ranges.see):
        logprobs = [workload.logprobs(model, rows).cpu() for rows in _with_progress(workload, tell, LOOK_FORWARD)]
    return ranges, torch.cat(logprobs)


@dataclass
class Gradients:
    """The FP32 gradient: binades by parameter, of each micro-batch, and by operation; the whole one's loss and norm."""

    operations: GradientRanges
    parameters: dict[str, Binades] = field(default_factory=dict)
    loss: float = 0.0
    norm: float = 0.0
    optimizer: OptimizerFindings | None = None


def look_backward(
    model: PreTrainedModel, workload: BatchedResponses, held_in_fp16: frozenset[Operation], tell: BatchCallback
) -> Gradients:
    """The gradient of the loss in FP32."""
    result = Gradients(GradientRanges(held_in_fp16))
    parameters = dict(model.named_parameters())
    result.parameters = {name: Binades() for name in parameters}
    totals = [torch.zeros_like(parameter) for parameter in parameters.values()]
    with computing(model.device):
        for rows in _with_progress(workload, tell, LOOK_BACKWARD):
            with OperationWatch(model, result.operations.see):
                logprobs_T = workload.logprobs(model, rows)
            loss = workload.loss(logprobs_T, rows)
            result.loss += float(loss.detach())
            gradients = _gradients(loss, list(parameters.values()), retain=False)
            for binades, gradient, total in zip(result.parameters.values(), gradients, totals, strict=True):
                binades.add(gradient)
                total += gradient
    result.norm = float(torch.stack(torch._foreach_norm(totals)).norm())
    result.optimizer = _moments(totals, result.norm)
    return result


def try_backward(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    workload: BatchedResponses,
    exponents: Sequence[int],
    tell: BatchCallback,
) -> list[ScaleTrial]:
    """True backward passes of a 16-bit model at loss scales 2^exponent, compared with the FP32 gradient.

    exponents: ascending. Those above one that overflows are not tried, and not in the result.
    """
    tally = _Tally(model, reference, list(exponents))
    passes, what = passes_backward(len(exponents)), f"gradients at {write_many(len(exponents), 'loss scale')}"
    with computing(model.device):
        for rows in _with_progress(workload, tell, passes, what):
            reference_loss = workload.loss(workload.logprobs(reference, rows), rows)
            reference_gradients = _gradients(reference_loss, tally.reference_parameters, retain=False)
            loss = workload.loss(workload.logprobs(model, rows), rows)
            for place, exponent in enumerate(exponents):
                scaled_loss = loss * 2.0**exponent
                gradients = _gradients(scaled_loss, tally.parameters, retain=place < len(exponents) - 1)
                tally.add(place, gradients, reference_gradients)
                if tally.overflows_at(place):
                    break
    return tally.trials()


def try_scales(
    model: PreTrainedModel, reference: PreTrainedModel, workload: BatchedResponses, *, tell: BatchCallback
) -> list[ScaleTrial]:
    """Of EXPONENTS every fourth, then each around the ends of those that fit."""
    scales = try_backward(model, reference, workload, EXPONENTS[::_COARSE_STEP], tell)
    ends = exponents_at_the_ends(scales)
    if ends:
        scales += try_backward(model, reference, workload, ends, tell)
    return sorted(scales, key=lambda scale: scale.exponent)


def exponents_at_the_ends(scales: Sequence[ScaleTrial]) -> list[int]:
    """Exponents not tried yet between the outermost that fit and the next that were tried and do not."""
    low, high = scales_that_fit(scales, None)
    if low is None or high is None:
        return []
    exponents = [scale.exponent for scale in scales]
    exponent_below = max((exponent for exponent in exponents if exponent < low), default=low)
    exponent_above = min((exponent for exponent in exponents if exponent > high), default=high)
    return [*range(exponent_below + 1, low), *range(high + 1, exponent_above)]


def _with_progress(
    workload: BatchedResponses, tell: BatchCallback, passes: Passes, what: str = ""
) -> Iterator[list[int]]:
    """The batches; the progress callback is called as each begins."""
    for number, rows in enumerate(workload.batches, 1):
        tell(PassStarted(what, number, len(workload.batches), passes))
        yield rows


class _Tally:
    """Sums of squares over micro-batches, and which parameters were not finite."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel, exponents: list[int]) -> None:
        parameters = dict(model.named_parameters())
        self.parameters = list(parameters.values())
        self.reference_parameters = list(reference.parameters())
        places = {id(parameter): place for place, parameter in enumerate(self.reference_parameters)}
        self._names = list(parameters)
        reference_parameters = dict(reference.named_parameters(remove_duplicate=False))
        self._place_of = [places[id(reference_parameters[name])] for name in parameters]
        self._exponents = exponents
        self._squares = 0.0
        self._squared_errors = [0.0] * len(exponents)
        self._nonfinite: list[dict[str, None]] = [{} for _ in exponents]

    def add(self, trial: int, gradients: list[torch.Tensor], reference_gradients: list[torch.Tensor]) -> None:
        """One micro-batch at one scale."""
        if trial == 0:
            self._squares += _squared_norm(reference_gradients)
        finite = [bool(norm.isfinite()) for norm in torch._foreach_norm(gradients, torch.inf)]
        bad = [name for name, is_finite in zip(self._names, finite, strict=True) if not is_finite]
        self._nonfinite[trial] |= dict.fromkeys(bad)
        if bad:
            return
        errors = [-gradient for gradient in reference_gradients]
        for place, gradient in zip(self._place_of, gradients, strict=True):
            errors[place].add_(gradient.float(), alpha=2.0 ** -self._exponents[trial])
        self._squared_errors[trial] += _squared_norm(errors)

    def overflows_at(self, trial: int) -> bool:
        """Whether a gradient of any micro-batch so far was not finite; then the higher scales are left out."""
        return bool(self._nonfinite[trial])

    def trials(self) -> list[ScaleTrial]:
        if self._squares == 0:
            raise UsageError(
                "the loss has no gradient even in FP32, because the model is certain of every response; give a higher "
                "--temperature or other --prompts"
            )
        num_tried = next((trial + 1 for trial, bad in enumerate(self._nonfinite) if bad), len(self._exponents))
        totals = zip(self._exponents, self._squared_errors, self._nonfinite, strict=True)
        return [
            ScaleTrial(
                exponent=exponent,
                relative_error=None if bad else math.sqrt(errors / self._squares),
                num_nonfinite=len(bad),
                nonfinite=list(bad)[:8],
            )
            for exponent, errors, bad in list(totals)[:num_tried]
        ]


def _gradients(loss: torch.Tensor, parameters: list[torch.nn.Parameter], *, retain: bool) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, parameters, retain_graph=retain, allow_unused=True, materialize_grads=True))


def _squared_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum())


def _moments(gradients: list[torch.Tensor], norm: float) -> OptimizerFindings:
    """AdamW's moments (1 - b1) g and (1 - b2) g^2 after a step on the clipped gradient, by `train`'s defaults."""
    settings = OptimizerSettings()
    clip = min(1.0, settings.max_grad_norm / norm) if norm > 0 else 1.0
    first, second = Binades(), Binades()
    for gradient in gradients:
        first.add(gradient * (clip * (1 - settings.betas[0])))
        second.add((gradient * clip).square() * (1 - settings.betas[1]))
    return OptimizerFindings(first_moment_flushed=first.flushed_share(0), second_moment_flushed=second.flushed_share(0))


EXPONENTS: Final = tuple(range(25))
_COARSE_STEP: Final = 4
_NEAR_THE_BEST: Final = 1.25
_NEGLIGIBLE_NATS: Final = 1e-5
_MOST: Final = 0.5
_FAR: Final = 8.0


@dataclass(frozen=True)
class TrialRun:
    """A trial, its forward ranges, its first operation, in the order of execution, whose result is not finite, and how
    far its log-probs lie from FP32's, nats [T].
    """

    trial: PrecisionTrial
    ranges: ForwardRanges
    first_nonfinite: Operation | None
    errors_T: torch.Tensor


@dataclass(frozen=True)
class Bench:
    """The reference of every trial: the FP32 model and its log-probs [T] of the responses."""

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
        exponents: Sequence[int] | None = None,
        yardstick: TrialRun | None = None,
        tell: BatchCallback,
    ) -> TrialRun:
        """Load the model in `dtype` with some modules, and the residual stream from a layer on, in FP32, and try it.

        `yardstick` is what a loss scale's gradient and the log-probs have to match, BF16. exponents: unset, those that
        `try_scales` needs. The backward passes are left out where the forward pass is not finite.
        """
        model = fp32_parts.load_in_format(self.folder, dtype, self.settings)
        if modules or residual_from:
            fp32_parts.raise_to_fp32(model, self.reference, modules, residual_from)
        ranges, tried_T = look_forward(model, self.workload, (), tell)
        errors_T = (tried_T.double() - self.logprobs_T.double()).abs()
        error = _error_or_none(float(errors_T.square().mean().sqrt()))
        if error is None:
            scales = []
        elif exponents is None:
            scales = try_scales(model, self.reference, self.workload, tell=tell)
        else:
            scales = try_backward(model, self.reference, self.workload, exponents, tell)
        low, high = scales_that_fit(scales, None if yardstick is None else yardstick.trial)
        largest = ranges.largest().items()
        first = next((operation for operation, value in largest if not math.isfinite(value)), None)
        trial = PrecisionTrial(
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


def _error_or_none(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _further_share(errors_T: torch.Tensor, yardstick_T: torch.Tensor) -> float:
    """Of the tokens where either is off by more than FP32's own rounding explains."""
    off_T = torch.maximum(errors_T, yardstick_T) > _NEGLIGIBLE_NATS
    return float((errors_T > yardstick_T)[off_T].double().mean()) if bool(off_T.any()) else 0.0


def scales_that_fit(scales: Sequence[ScaleTrial], yardstick: PrecisionTrial | None) -> tuple[int | None, int | None]:
    """The range of tried exponents around the most accurate one whose gradients are finite and nearly as accurate.

    Nearly: within 1.25 of its error. None fits where even that one is further from FP32 than the yardstick, or errs by
    as much as a gradient of zero.
    """
    errors = {scale.exponent: scale.relative_error for scale in scales if scale.relative_error is not None}
    if not errors:
        return None, None
    best = min(errors, key=errors.__getitem__)
    limit = None if yardstick is None else yardstick.gradient_error
    if errors[best] >= NO_GRADIENT or (limit is not None and errors[best] > limit):
        return None, None
    exponents = sorted(scale.exponent for scale in scales)
    is_near = [errors.get(exponent, math.inf) <= _NEAR_THE_BEST * errors[best] for exponent in exponents]
    first = last = exponents.index(best)
    while first > 0 and is_near[first - 1]:
        first -= 1
    while last + 1 < len(exponents) and is_near[last + 1]:
        last += 1
    return exponents[first], exponents[last]


def fits(trial: PrecisionTrial, yardstick: PrecisionTrial) -> bool:
    """Everything finite, log-probs at least as close to FP32 as the yardstick's, and a loss scale that fits, where the
    responses leave a gradient that can be seen.
    """
    has_scale = trial.from_exponent is not None or not leaves_gradient(trial, yardstick)
    return trial.first_nonfinite is None and has_scale and is_close(trial, yardstick)


def is_close(trial: PrecisionTrial, yardstick: PrecisionTrial) -> bool:
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
