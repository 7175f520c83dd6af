"""The examination, part by part, and the advice that follows from it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from transformers import PreTrainedModel

from mismatch_probe import __version__
from mismatch_probe.compare.cost.headroom import HeadroomClock, PassStarted
from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.dtypes import FP16_LOSSY, FP16_ROUNDS_TO_INFINITY, Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.headroom.findings import activation_findings, gradient_findings, held_in_fp16, scan_weights
from mismatch_probe.headroom.judge import judge_headroom, judge_weights
from mismatch_probe.headroom.passes import (
    BatchCallback,
    Bench,
    Gradients,
    TrialRun,
    fits,
    is_close,
    look_backward,
    look_forward,
)
from mismatch_probe.headroom.ranges import ForwardRanges, Operation, squared_norm
from mismatch_probe.headroom.responses import (
    SAMPLED_BY,
    BatchedResponses,
    ResponseLoss,
    load_objective,
    load_problems,
    sample_responses,
)
from mismatch_probe.notation import write_many
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.records.examinations import Headroom, PrecisionTrial, leaves_gradient
from mismatch_probe.tasks import resolve_model
from mismatch_probe.training_path.fit import require_fit
from mismatch_probe.training_path.inside import fp32_parts
from mismatch_probe.training_path.loading import choose_device

_ROUNDS: Final = 8
_MOST_IN_FP32: Final = 0.5
_SCALE_STEPS: Final = (0, 4, 8, 12, 16)


@dataclass(frozen=True)
class PlainRuns:
    """What the plain runs showed: FP32 ranges and gradients, and which operations the FP16 run holds in FP16."""

    ranges: ForwardRanges
    gradients: Gradients
    held_in_fp16: frozenset[Operation]

    def too_large(self) -> list[str]:
        """Modules with a result held in FP16 that overflows it."""
        largest = self.ranges.largest().items()
        return [
            operation.module
            for operation, value in largest
            if operation in self.held_in_fp16 and not value < FP16_ROUNDS_TO_INFINITY
        ]

    def too_small(self) -> list[str]:
        """Modules with results held in FP16 that BF16 would hold better."""
        errors = self.ranges.rounding_errors().items()
        return [
            operation.module for operation, error in errors if operation in self.held_in_fp16 and error > FP16_LOSSY
        ]

    def gradients_too_large(self, exponent: int) -> list[str]:
        """Modules with a gradient, of a result or a parameter, that overflows FP16 at that loss scale."""
        limit = FP16_ROUNDS_TO_INFINITY / 2.0**exponent
        results = [
            operation.module
            for operation, binades in self.gradients.operations.binades.items()
            if not binades.largest < limit
        ]
        weights = [_owner(name) for name, binades in self.gradients.parameters.items() if not binades.largest < limit]
        return [*results, *weights]


def try_exceptions(
    bench: Bench, plain_runs: PlainRuns, plain: TrialRun, bf16: TrialRun, tell: BatchCallback
) -> PrecisionTrial | None:
    """The FP16 run with modules in FP32 that fits, else the last one tried; None where there was nothing to try.

    A run that would hold more than half of the weights in FP32 is not tried.
    """
    layers = fp32_parts.layer_names(bench.reference)
    trial_run, chosen_modules = plain, set[str]()
    for number in range(1, _ROUNDS + 1):
        blamed_modules = {
            fp32_parts.fp32_module(bench.reference, module)
            for module in _suspects(bench, plain_runs, trial_run, chosen_modules, bf16.trial)
        }
        if blamed_modules <= chosen_modules:
            break
        chosen_modules |= blamed_modules
        modules = fp32_parts.outermost(chosen_modules - set(layers))
        if _share_of_weights(bench, modules) > _MOST_IN_FP32:
            break
        residual_from = next((layer for layer in layers if layer in chosen_modules), None)
        tell_of_try = partial(_tell_of_try, tell, number)
        trial_run = bench.run(
            Dtype.FP16, modules=modules, residual_from=residual_from, yardstick=bf16, tell=tell_of_try
        )
        if fits(trial_run.trial, bf16.trial):
            break
    return None if trial_run is plain else trial_run.trial


def _tell_of_try(tell: BatchCallback, number: int, started_pass: PassStarted) -> None:
    words = [f"try {number} of at most {_ROUNDS}", started_pass.what]
    tell(started_pass._replace(what=", ".join(word for word in words if word)))


def modules_of_overflowing_weights(model: PreTrainedModel) -> list[str]:
    """Modules of an FP32 model with a weight that is infinite in FP16, whether or not a response came by it."""
    parameters = model.named_parameters()
    return [_owner(name) for name, weights in parameters if not bool(weights.half().isfinite().all())]


def _suspects(
    bench: Bench, plain_runs: PlainRuns, trial_run: TrialRun, chosen_modules: set[str], bf16: PrecisionTrial
) -> list[str]:
    """Modules at fault for what is wrong with a run that has `chosen_modules` in FP32."""
    trial = trial_run.trial
    suspects = modules_of_overflowing_weights(bench.reference)
    if trial_run.first_nonfinite is not None:
        return [*plain_runs.too_large(), trial_run.first_nonfinite.module, *suspects]
    if not is_close(trial, bf16):
        suspects += [*plain_runs.too_small(), *_of_lossy_weights(bench)]
    if trial.from_exponent is None and leaves_gradient(trial, bf16):
        for exponent in _SCALE_STEPS:
            operations = plain_runs.gradients_too_large(exponent)
            if not {fp32_parts.fp32_module(bench.reference, module) for module in operations} <= chosen_modules:
                return suspects + operations
    return suspects


def _of_lossy_weights(bench: Bench) -> list[str]:
    parameters = bench.reference.named_parameters()
    return [
        _owner(name)
        for name, weights in parameters
        if bool(squared_norm(weights.half().float() - weights) > FP16_LOSSY**2 * squared_norm(weights))
    ]


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _share_of_weights(bench: Bench, modules: list[str]) -> float:
    """Of all parameters, those of the modules."""
    parameters = {parameter for name in modules for parameter in bench.reference.get_submodule(name).parameters()}
    return sum(parameter.numel() for parameter in parameters) / bench.reference.num_parameters()


StageProgressCallback = Callable[[str, int, int, str], None]
"""Hears what is done, which stage that is, from 1, of how many, and how far it is."""

_STAGES: Final = ("weights", "responses", "fp32_forward", "bf16", "fp16", "fp32_backward")
_FURTHER_STAGES: Final = ("advised",)
"""Only where FP16 does not fit."""


class _Stages:
    """Tells which stage begins and, by what it gives, how far it is; keeps its seconds."""

    def __init__(self, tell: StageProgressCallback, clock: HeadroomClock, num_stages: int) -> None:
        self.seconds: dict[str, float] = {}
        self._tell = tell
        self._clock = clock
        self._num_stages = num_stages

    @contextmanager
    def __call__(self, name: str, doing: str) -> Iterator[Callable[[str | PassStarted], None]]:
        number = (*_STAGES, *_FURTHER_STAGES).index(name) + 1

        def tell(how_far: str | PassStarted) -> None:
            words, detail = doing, how_far
            if isinstance(how_far, PassStarted):
                self._clock.batch(how_far)
                words = f"{doing}, {how_far.what}" if how_far.what else doing
                detail = f"{how_far.number} of {how_far.of} batches"
            self._tell(words, number, max(number, self._num_stages), str(detail))

        self._clock.begin(name)
        tell("")
        start = time.perf_counter()
        yield tell
        self.seconds[name] = round(time.perf_counter() - start, 3)


def measure_headroom(
    settings: HeadroomSettings, tell: StageProgressCallback, clock: HeadroomClock | None = None
) -> Headroom:
    """Does the checkpoint fit FP16? `tell` receives each stage, and how far it is; `clock` what is left of it.

    Raises:
        BrokenRecord: the checkpoint's answers are not finite even in FP32.
    """
    stages = _Stages(tell, clock or HeadroomClock(), 1 if settings.weights_only else len(_STAGES))
    objective = load_objective(settings)
    folder = resolve_model(settings.model)
    problems = None
    if not settings.weights_only:
        choose_device(settings.device)
        require_fit(folder, trust_remote_code=settings.model.trust_remote_code)
        problems = load_problems(folder, settings)
    with stages("weights", "reading every weight") as tell_how_far:
        weights = scan_weights(folder, tell_how_far)
    headroom = Headroom(
        tool_version=__version__,
        created_at=environment.utc_now(),
        model=settings.model.path,
        model_fingerprint=checkpoint.fingerprint(folder),
        settings=settings,
        device=None,
        sampled_by=None,
        verdict=judge_weights(weights),
        weights=weights,
        seconds=stages.seconds,
    )
    if problems is None or weights.total.num_nonfinite:
        return headroom
    reference = fp32_parts.load_in_format(folder, Dtype.FP32, settings, attention="eager")
    num_responses = len(problems.prompts) * settings.sampling.samples_per_prompt
    with stages("responses", f"sampling {write_many(num_responses, 'response')} in FP32") as tell_how_far:
        responses = sample_responses(reference, problems, settings, tell_how_far)
    workload = BatchedResponses.plan(
        responses.sequences,
        ResponseLoss(objective, responses, settings.sampling.max_new_tokens),
        vocab_size=fp32_parts.num_embeddings(reference),
        temperature=settings.sampling.temperature,
        tokens=settings.batch_tokens,
    )
    with stages("fp32_forward", "FP32, sizes of all results") as tell_how_far:
        ranges, logprobs_T = look_forward(reference, workload, fp32_parts.layer_names(reference), tell_how_far)
    if not bool(logprobs_T.isfinite().all()):
        raise BrokenRecord(
            f"the log-probs of {settings.model.path} are not finite even in FP32: give --model an intact checkpoint"
        )
    bench = Bench(folder, settings, reference, workload, logprobs_T)
    with stages("bf16", "BF16, to compare with") as tell_how_far:
        bf16 = bench.run(Dtype.BF16, exponents=(0,), tell=tell_how_far)
    with stages("fp16", "FP16") as tell_how_far:
        plain = bench.run(Dtype.FP16, yardstick=bf16, tell=tell_how_far)
    operations_in_fp16 = held_in_fp16(plain.ranges)
    with stages("fp32_backward", "FP32, sizes of all gradients") as tell_how_far:
        gradients = look_backward(reference, workload, operations_in_fp16, tell_how_far)
    overflowing = modules_of_overflowing_weights(reference)
    advice = None
    if overflowing or not fits(plain.trial, bf16.trial):
        with stages("advised", "FP16 with modules in FP32") as tell_how_far:
            advice = try_exceptions(bench, PlainRuns(ranges, gradients, operations_in_fp16), plain, bf16, tell_how_far)
    first = plain.trial.first_nonfinite
    activations = activation_findings(reference, ranges, plain.ranges, responses, first)
    gradient = gradient_findings(gradients, responses, objective.name)
    return headroom.model_copy(
        update={
            "device": str(reference.device),
            "sampled_by": SAMPLED_BY,
            "activations": activations,
            "gradients": gradient,
            "plain": plain.trial,
            "bf16": bf16.trial,
            "advised": advice,
            "verdict": judge_headroom(weights, activations, gradient, plain.trial, bf16.trial, advice, overflowing),
            "seconds": stages.seconds,
        }
    )
