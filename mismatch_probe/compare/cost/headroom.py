"""What an examination for FP16 takes: its passes, a forecast before it runs, and how much is left while it runs.

A pass computes all responses once, in batches. A look is a forward pass whose every result is looked at; all else is
counted in plain forward passes, a backward pass as two of them.
"""

import time
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.earlier import FROM_RATES
from mismatch_probe.compare.cost.memory import LIBRARY_BYTES, ProcessMemory
from mismatch_probe.compare.cost.roofline import (
    PASS_OPERATIONS,
    Architecture,
    Calibration,
    ProcessName,
    Span,
    Work,
    decoding,
    passes_over,
)
from mismatch_probe.config.examinations import HEADROOM_PROMPTS, HeadroomSettings
from mismatch_probe.dtypes import Dtype

HEADROOM_KINDS: Final[tuple[tuple[ProcessName, Dtype], ...]] = (("training", Dtype.FP32), ("training", Dtype.FP16))
"""Whose rates a forecast needs."""
MOST_SAMPLED_TOGETHER: Final = 32
"""Responses that are sampled in one batch; a step of it takes hardly longer than one of a single response."""
_BACKWARD: Final = 2
_LOOK: Final = 4.0
"""Forward passes that a look takes as long as, until one was timed: it is eager, and of each result has the maximum."""
_SHARE_IN_FP32: Final = 0.25
"""Of the forward passes: those of the FP32 gradient, which each 16-bit one is held against."""
_WEIGHT_BYTES: Final = 16
"""Of a weight: in FP32 with its gradient and the difference of two, in 16 bits with its gradient."""
_LIVE_WIDTHS: Final = 12
_LIVE_INNER_WIDTHS: Final = 4
_LIVE_SCORES: Final = 3
_LIVE_LOGITS: Final = 4
"""FP32 tensors that a backward pass needs of each layer, of a token's width and of its MLP's, of each pair of tokens in
each head, and of the logits.
"""


class Passes(NamedTuple):
    """What a batch takes."""

    looks: int
    forwards: int
    """Plain forward passes, or as long as so many."""


def passes_backward(num_scales: int) -> Passes:
    """The gradient in FP32, and that of a 16-bit model at so many loss scales."""
    return Passes(0, 1 + _BACKWARD + 1 + _BACKWARD * num_scales)


LOOK_FORWARD: Final = Passes(1, 0)
LOOK_BACKWARD: Final = Passes(1, _BACKWARD)
_COARSE_SCALES, _FINE_SCALES = 7, 6
"""Loss scales that an FP16 run usually tries: each fourth of them, then those around the ends of what fits."""
_IN_FP16: Final = Passes(1, passes_backward(_COARSE_SCALES).forwards + passes_backward(_FINE_SCALES).forwards)
_PLAN: Final[Mapping[str, Passes]] = MappingProxyType(
    {
        "fp32_forward": LOOK_FORWARD,
        "bf16": Passes(1, passes_backward(1).forwards),
        "fp16": _IN_FP16,
        "fp32_backward": LOOK_BACKWARD,
    }
)
"""Of each stage in its order, where the checkpoint fits; a run with modules in FP32 takes as much as one in FP16."""


class PassStarted(NamedTuple):
    """A batch of a pass begins."""

    what: str
    """Of the stage, in words; empty where the stage is this pass alone."""
    number: int
    """The batch, from 1."""
    of: int
    passes: Passes


class HeadroomForecast(BaseModel):
    """The time and memory of an examination for FP16 where the checkpoint fits. Modules that are tried in FP32, where
    it does not, come on top, each try about as long as all before.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    time: Span
    memory: ProcessMemory
    num_batches: int
    """Of one pass over all responses."""
    sample_seconds: float
    forward_seconds: float
    """Of a batch."""


def forecast_headroom(
    settings: HeadroomSettings,
    architecture: Architecture,
    prompt_tokens: Sequence[int],
    response_tokens: float,
    calibration: Calibration,
) -> HeadroomForecast:
    """prompt_tokens: of each prompt of the source, in order. response_tokens: of a response on average, if it may be as
    long. calibration: with rates of `HEADROOM_KINDS`.
    """
    sampling = settings.sampling
    num_prompts = settings.prompts.num_prompts or HEADROOM_PROMPTS
    prompts = np.tile(np.asarray(prompt_tokens[:num_prompts], dtype=np.float64), sampling.samples_per_prompt)
    each = min(response_tokens, sampling.max_new_tokens)
    lengths = prompts + each
    num_batches = max(1, ceil(float(lengths.sum()) / settings.batch_tokens))
    in_fp32, in_fp16 = (calibration.rates_of(*kind) for kind in HEADROOM_KINDS)
    steps = ceil(len(prompts) / MOST_SAMPLED_TOGETHER) * each
    sampled = decoding(Dtype.FP32, architecture, prompts, each, steps) + Work(operations=steps * PASS_OPERATIONS)
    a_pass = passes_over("training", architecture, lengths, num_batches)
    forward = _SHARE_IN_FP32 * in_fp32.seconds(a_pass) + (1 - _SHARE_IN_FP32) * in_fp16.seconds(a_pass)
    sample_seconds = in_fp32.seconds(sampled)
    total = sum(_LOOK * passes.looks + passes.forwards for passes in _PLAN.values())
    return HeadroomForecast(
        time=Span.around(sample_seconds + total * forward, FROM_RATES),
        memory=_memory(settings, architecture, lengths.max(), in_fp32.device, calibration),
        num_batches=num_batches,
        sample_seconds=sample_seconds,
        forward_seconds=forward / num_batches,
    )


def _memory(
    settings: HeadroomSettings, architecture: Architecture, longest: float, device: str, calibration: Calibration
) -> ProcessMemory:
    tokens = max(settings.batch_tokens, longest)
    layer = _LIVE_WIDTHS * architecture.hidden_size + _LIVE_INNER_WIDTHS * architecture.intermediate_size
    scores = _LIVE_SCORES * architecture.num_heads * longest
    numbers = architecture.num_layers * (layer + scores) + _LIVE_LOGITS * architecture.vocab_size
    num_bytes = _WEIGHT_BYTES * architecture.parameters + 4 * tokens * numbers
    return ProcessMemory(
        process="headroom",
        stage="fp32_backward",
        device=device,
        peak_bytes=int(num_bytes) + (LIBRARY_BYTES if device == "cpu" else 0),
        available_bytes=calibration.device_memory_bytes[device],
        advice="leave --headroom out, and give `headroom --run RUN --weights-only`, or a lower --batch-tokens",
    )


class HeadroomClock:
    """Hears which stage of an examination runs and which batch begins; `remaining` is the time that is left.

    Looks and plain passes are timed apart, since what a look adds depends on the model. Until one was timed, the time
    is that of the forecast, where there is one.
    """

    def __init__(self, forecast: HeadroomForecast | None = None) -> None:
        self._forecast = forecast
        self._num_batches = None if forecast is None else forecast.num_batches
        self._stage = ""
        self._pass: PassStarted | None = None
        self._since = time.monotonic()
        self._looks_done = self._forwards_done = 0
        """Of the stage, in batches."""
        self._look_times: list[float] = []
        self._forward_times: list[float] = []

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before is done."""
        self._end_batch()
        self._stage = stage
        self._looks_done = self._forwards_done = 0

    def batch(self, started_pass: PassStarted) -> None:
        self._end_batch()
        if started_pass.number == 1 and started_pass.passes == LOOK_FORWARD:
            self._looks_done = self._forwards_done = 0
        self._pass, self._num_batches = started_pass, started_pass.of

    def remaining(self) -> float | None:
        """Seconds; None while nothing tells how long a pass takes."""
        rates, batches = self._batch_seconds(), self._num_batches
        if rates is None or batches is None:
            return None
        look, forward = rates
        seconds_so_far = time.monotonic() - self._since
        names = list(_PLAN)
        if self._stage in _PLAN:
            stages_left = names[names.index(self._stage) + 1 :]
        else:
            stages_left = [] if self._stage == "advised" else names
        seconds = sum(batches * (_PLAN[name].looks * look + _PLAN[name].forwards * forward) for name in stages_left)
        if self._stage in _PLAN or self._stage == "advised":
            passes = _PLAN.get(self._stage, _IN_FP16)
            looks = max(0, batches * passes.looks - self._looks_done)
            forwards = max(0, batches * passes.forwards - self._forwards_done)
            seconds += max(0.0, looks * look + forwards * forward - seconds_so_far)
        elif self._forecast is not None:
            seconds += max(0.0, self._forecast.sample_seconds - seconds_so_far)
        return seconds

    def _end_batch(self) -> None:
        instant, started_pass = time.monotonic(), self._pass
        if started_pass is not None:
            looks, forwards = started_pass.passes
            self._looks_done += looks
            self._forwards_done += forwards
            if not forwards:
                self._look_times.append((instant - self._since) / looks)
            elif not looks:
                self._forward_times.append((instant - self._since) / forwards)
        self._pass, self._since = None, instant

    def _batch_seconds(self) -> tuple[float, float] | None:
        """Of a look and of a plain forward pass, each measured, or by the other, or as forecast."""
        look, forward = _mean(self._look_times), _mean(self._forward_times)
        if look is None and forward is None:
            if self._forecast is None:
                return None
            forward = self._forecast.forward_seconds
        if forward is None:
            assert look is not None
            forward = look / _LOOK
        return _LOOK * forward if look is None else look, forward


def _mean(seconds: Sequence[float]) -> float | None:
    return sum(seconds) / len(seconds) if seconds else None
