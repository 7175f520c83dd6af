# mypy: allow-untyped-calls
# ruff: noqa: N806 - shape suffixes
"""The examination, stage after stage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from mismatch_probe import __version__
from mismatch_probe.config.headroom import HeadroomSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.headroom import models
from mismatch_probe.headroom.advice import Seen, modules_of_overflowing_weights, try_exceptions
from mismatch_probe.headroom.batched_responses import BatchedResponses
from mismatch_probe.headroom.findings import activation_findings, gradient_findings, held_in_fp16
from mismatch_probe.headroom.judge import judge_headroom, judge_weights
from mismatch_probe.headroom.loss import ResponseLoss, load_objective
from mismatch_probe.headroom.passes import look_backward, look_forward
from mismatch_probe.headroom.responses import SAMPLED_BY, load_problems, sample_responses
from mismatch_probe.headroom.trial import Bench, fits
from mismatch_probe.headroom.weights import scan_weights
from mismatch_probe.notation import write_many
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.tasks import resolve_model
from mismatch_probe.training_path.fit import require_fit
from mismatch_probe.training_path.loading import choose_device

Tell = Callable[[str, int, int, str], None]
"""Hears what is done, which stage that is, from 1, of how many, and how far it is."""

_STAGES: Final = ("weights", "responses", "fp32_forward", "bf16", "fp16", "fp32_backward", "advised")


class _Stages:
    """Tells which stage begins and, by what it gives, how far it is; keeps its seconds."""

    def __init__(self, tell: Tell, num_stages: int) -> None:
        self.seconds: dict[str, float] = {}
        self._tell = tell
        self._num_stages = num_stages

    @contextmanager
    def __call__(self, name: str, doing: str) -> Iterator[Callable[[str], None]]:
        tell = partial(self._tell, doing, _STAGES.index(name) + 1, self._num_stages)
        tell("")
        begun = time.perf_counter()
        yield tell
        self.seconds[name] = round(time.perf_counter() - begun, 3)


def measure_headroom(settings: HeadroomSettings, tell: Tell) -> Headroom:
    """Does the checkpoint fit FP16? `tell` hears of each stage, and how far it is.

    Raises:
        UsageError: the checkpoint, the prompts, the reward or the objective cannot be used.
        MissingExtra: a needed package is not installed.
        OutOfMemory: a run does not fit.
        BrokenRecord: the checkpoint's answers are not finite even in FP32.
    """
    stages = _Stages(tell, 1 if settings.weights_only else len(_STAGES))
    objective = load_objective(settings)
    folder = resolve_model(settings.model)
    problems = None
    if not settings.weights_only:
        choose_device(settings.device)
        require_fit(folder, trust_remote_code=settings.model.trust_remote_code)
        problems = load_problems(folder, settings)
    with stages("weights", "weights: reading every tensor") as tell_how_far:
        weights = scan_weights(folder, tell_how_far)
    headroom = Headroom(
        tool_version=__version__,
        created_at=environment.now(),
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
    reference = models.load(folder, Dtype.FP32, settings, attention="eager")
    asked = write_many(len(problems.prompts), "prompt")
    with stages("responses", f"responses: {asked}, sampled in FP32") as tell_how_far:
        responses = sample_responses(reference, problems, settings, tell_how_far)
    workload = BatchedResponses.plan(
        responses.sequences,
        ResponseLoss(objective, responses, settings.sampling.max_new_tokens),
        vocab_size=models.num_embeddings(reference),
        temperature=settings.sampling.temperature,
        tokens=settings.batch_tokens,
    )
    with stages("fp32_forward", "activations: FP32") as tell_how_far:
        ranges, logprobs_T = look_forward(reference, workload, models.layer_names(reference), tell_how_far)
    if not bool(logprobs_T.isfinite().all()):
        raise BrokenRecord(
            f"the log-probs of {settings.model.path} are not finite even in FP32: give --model an intact checkpoint"
        )
    bench = Bench(folder, settings, reference, workload, logprobs_T)
    with stages("bf16", "BF16, as the yardstick") as tell_how_far:
        bf16 = bench.run(Dtype.BF16, exponents=(0,), tell=tell_how_far)
    with stages("fp16", "FP16: forward, and backward at each loss scale") as tell_how_far:
        plain = bench.run(Dtype.FP16, yardstick=bf16, tell=tell_how_far)
    held = held_in_fp16(plain.ranges)
    with stages("fp32_backward", "gradients: FP32") as tell_how_far:
        gradients = look_backward(reference, workload, held, tell_how_far)
    overflowing = modules_of_overflowing_weights(reference)
    advised = None
    if overflowing or not fits(plain.trial, bf16.trial):
        with stages("advised", "advice: FP16 with modules in FP32") as tell_how_far:
            advised = try_exceptions(bench, Seen(ranges, gradients, held), plain, bf16, tell_how_far)
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
            "advised": advised,
            "verdict": judge_headroom(weights, activations, gradient, plain.trial, bf16.trial, advised, overflowing),
            "seconds": stages.seconds,
        }
    )
