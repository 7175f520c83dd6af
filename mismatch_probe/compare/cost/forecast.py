"""How long a comparison takes: each stage before it runs, and how much is left while it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.earlier import (
    FROM_RATES,
    Measurement,
    Pace,
    architectures_of,
    earlier_runs,
    expected_workload,
    measure_for,
)
from mismatch_probe.compare.cost.memory import with_stages_by_layer
from mismatch_probe.compare.cost.roofline import NO_TIME, Calibration, Span, UnknownArchitecture, Work
from mismatch_probe.compare.cost.stage_work import (
    ResponseLengths,
    Workload,
    computes,
    is_dealt_out,
    key_of,
    loading_work,
    loads_model,
    received_by_rank,
    work_of,
)
from mismatch_probe.compare.plan import AnyEvent, BatchDone, JobStarted, StageDone, StageStarted, make_plan, plan_of
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import SampleStage, Stage
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.vllm.declared import compilation_defaults
from mismatch_probe.records.run_directory import RunDirectory

_ENGINE_START_SHARE: Final = 0.5
_REFERENCE_START_SHARE: Final = 0.25
_MODEL_LOAD_SHARE: Final = 0.03
"""Of the seconds that a command takes until all is imported and configured: what starting an engine that does not
compile takes besides, starting the training path with its reference, and loading another model there. All of it is of
the same kind, Python at work.
"""
_SAME_MACHINE: Final = 1.5
"""Between this much faster and slower, what was just timed happens again."""
_SUMMARY_OPERATIONS: Final = 5e5
_SUMMARY_TOKEN_OPERATIONS: Final = 0.4
"""Of the statistics and the page: for a pair, and for each of its response tokens."""


class StageForecast(BaseModel):
    """A stage's time."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    stage: str
    start: Span | None
    """From the end of the stage before to the first batch; None where nothing measured shows it."""
    work: Span
    """Of its batches."""


class Forecast(BaseModel):
    """A comparison's time."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    ready: Span
    """Until everything is imported and checked."""
    stages: list[StageForecast]
    summary: Span
    """Statistics and report."""
    total: Span
    """Of all that is known."""
    unknown_starts: list[str]
    """The stages whose start is not in `total`."""
    of_servers: list[str] = []
    """Those of which nothing is in it: how fast a server is cannot be measured here."""
    over_ranks: list[str] = []
    """Those over ranks that no earlier run over as many tells of."""
    received_bytes: dict[str, int] = {}
    """What each of their ranks receives from the others. How long that takes is not in the time, since nothing here
    tells how fast ranks are connected.
    """


@dataclass(frozen=True)
class Starting:
    """What is known of starts that no earlier run shows."""

    ready_seconds: float
    """From the command's start until everything was imported and its inputs checked."""
    on_cpu: bool
    """There an engine starts eagerly unless it is told to compile."""

    @classmethod
    def on_this_machine(cls, calibration: Calibration, ready_seconds: float) -> Self:
        on_cpu = all(rate.device == "cpu" for rate in calibration.rates if rate.process == "engine")
        return cls(ready_seconds, on_cpu)

    def span(self, stage: Stage, workload: Workload, pace: Pace) -> Span | None:
        """None for an engine that compiles: nothing tells how long that takes."""
        if not loads_model(stage):
            return NO_TIME
        if stage.side.engine is not None and self._compiles(stage.side.engine):
            return None
        key = key_of(stage)
        reading = pace.rates_of(key.process, key.dtype).seconds(loading_work(stage, workload))
        return Span.around(_share(stage.side) * self.ready_seconds + reading, FROM_RATES)

    def _compiles(self, engine: EngineSettings) -> bool:
        args = {**engine.args, **compilation_defaults(engine.args, on_cpu=self.on_cpu)}
        return args.get("enforce_eager") is not True


def _share(side: Side) -> float:
    if side.engine is not None:
        return _ENGINE_START_SHARE
    return _REFERENCE_START_SHARE if side.role == "ref" and side.rounded_to is None else _MODEL_LOAD_SHARE


def forecast(stages: Sequence[Stage], workload: Workload, pace: Pace, starting: Starting) -> Forecast:
    """Needs a `pace` with a calibration."""
    local_stages = [stage for stage in stages if key_of(stage).process != "server"]
    forecasts = [each for stage in local_stages if (each := _of_stage(stage, workload, pace, starting)) is not None]
    ready = Span.around(starting.ready_seconds, _SAME_MACHINE)
    summary = _summary(workload, pace)
    dealt_out = [stage for stage in local_stages if is_dealt_out(stage) and computes(stage, workload)]
    unknown = [stage for stage in dealt_out if not pace.has_seen(key_of(stage))]
    known_spans = [span for stage in forecasts for span in (stage.start, stage.work) if span is not None]
    return Forecast(
        ready=ready,
        stages=forecasts,
        summary=summary,
        total=sum((ready, *known_spans, summary), start=NO_TIME),
        unknown_starts=[stage.stage for stage in forecasts if stage.start is None],
        of_servers=[stage.name for stage in stages if stage not in local_stages],
        over_ranks=[stage.name for stage in unknown],
        received_bytes={stage.name: int(received_by_rank(stage, workload)) for stage in unknown},
    )


def span_of_stages(stages: Sequence[Stage], workload: Workload, pace: Pace, starting: Starting) -> Span:
    """What these stages take, their starts with them; needs a `pace` with a calibration."""
    forecasts = [each for stage in stages if (each := _of_stage(stage, workload, pace, starting)) is not None]
    spans = [span for stage in forecasts for span in (stage.start, stage.work) if span is not None]
    return sum(spans, start=NO_TIME)


def _of_stage(stage: Stage, workload: Workload, pace: Pace, starting: Starting | None) -> StageForecast | None:
    """None where nothing measured tells how long its work takes."""
    work = work_of(stage, workload)
    if work == Work():
        return StageForecast(stage=stage.name, start=NO_TIME, work=NO_TIME)
    span = pace.span(key_of(stage), work)
    if span is None:
        return None
    start = pace.start_span(key_of(stage))
    if start is None and starting is not None:
        start = starting.span(stage, workload, pace)
    return StageForecast(stage=stage.name, start=start, work=span)


def _summary(workload: Workload, pace: Pace) -> Span:
    tokens = workload.sequences * workload.responses.mean_tokens
    each = _SUMMARY_OPERATIONS + _SUMMARY_TOKEN_OPERATIONS * tokens
    pi, *_ = workload.settings.train_sides
    rates = pace.rates_of("training", pi.dtype)
    return Span.around(rates.seconds(Work(operations=len(workload.settings.pairs) * each)), FROM_RATES)


_BY_ITS_OWN_BATCHES: Final = 1.3
"""Of a stage that is under way: its batches are alike."""


@dataclass
class _StageInProgress:
    stage: Stage
    batches: int
    began_with: int
    """Batches that were recorded before."""
    start_seconds: float
    """From the end of the stage before to its first batch."""
    since: float
    """When it began, by `time.monotonic`."""
    num_done: int = 0
    """Batches."""
    seconds: float = 0.0
    """Of those batches."""
    batch_since: float = 0.0
    """When the last of them ended."""

    @property
    def batches_remaining(self) -> int:
        return self.batches - self.began_with - self.num_done


class RunClock:
    """Hears a run's events; `remaining` is the time that its stages still need."""

    def __init__(
        self,
        stages: Sequence[Stage],
        workload: Workload,
        earlier_stages: Sequence[Measurement],
        calibration: Calibration | None = None,
        starting: Starting | None = None,
        stages_of_run: Callable[[], Sequence[Stage]] = tuple,
    ) -> None:
        """stages: those still to be run, in their order. calibration, starting: what tells of stages and of starts that
        no earlier run had. stages_of_run: all stages of the run by now.
        """
        self._pending_stages = list(stages)
        self._workload = workload
        self._calibration = calibration
        self._starting = starting
        self._stages_of_run = stages_of_run
        self._measurements = list(earlier_stages)
        self._stage: _StageInProgress | None = None
        self._idle_since = time.monotonic()
        self._sample_counts = [0, 0]

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, JobStarted):
            self._add_stages(event)
        elif isinstance(event, StageStarted):
            self._start(event)
        elif isinstance(event, BatchDone | StageDone) and self._stage is not None:
            if event.stage != self._stage.stage.name:
                return
            if isinstance(event, BatchDone):
                self._stage.num_done += 1
                self._stage.batch_since = time.monotonic()
                self._stage.seconds += event.seconds
                self._note_lengths(self._stage.stage, event)
            else:
                self._end(self._stage, is_skipped=event.skipped)

    def remaining(self) -> Span | None:
        """Statistics and report not counted, nor a start that nothing tells, as of an engine that compiles; None while
        nothing measured tells how long a stage to come will take.
        """
        pace = Pace(self._calibration, self._measurements)
        pending = [_of_stage(stage, self._workload, pace, self._starting) for stage in self._pending_stages]
        spans = [None if each is None else each.work + (each.start or NO_TIME) for each in pending]
        if self._stage is not None:
            spans.append(self._rest_of(self._stage, pace))
        elif pending and pending[0] is not None and spans[0] is not None:
            start = (pending[0].start or NO_TIME).likely_seconds
            spans[0] = spans[0].less(min(time.monotonic() - self._idle_since, start))
        known_spans = [span for span in spans if span is not None]
        return sum(known_spans, start=NO_TIME) if len(known_spans) == len(spans) else None

    def _add_stages(self, event: JobStarted) -> None:
        """Add the stages of a job that the run got once its pairs were judged. Rates that were measured in other dtypes
        tell nothing of them, but the run's own stages do.
        """
        if any(stage.name in event.stages for stage in self._pending_stages):
            return
        new_stages = [stage for stage in self._stages_of_run() if stage.name in event.stages]
        kinds = [key_of(stage) for stage in new_stages]
        if self._calibration is not None and not all(self._calibration.has(kind.process, kind.dtype) for kind in kinds):
            self._calibration = self._starting = None
        self._pending_stages = [*new_stages, *self._pending_stages]

    def _start(self, event: StageStarted) -> None:
        """Stages come in their order: what stands before this one is recorded already."""
        names = [stage.name for stage in self._pending_stages]
        if event.stage not in names:
            return
        time_now, place = time.monotonic(), names.index(event.stage)
        stage = self._pending_stages[place]
        del self._pending_stages[: place + 1]
        self._stage = _StageInProgress(stage, event.batches, event.batches_done, time_now - self._idle_since, time_now)

    def _end(self, in_progress: _StageInProgress, *, is_skipped: bool) -> None:
        self._stage, self._idle_since = None, time.monotonic()
        if is_skipped or not in_progress.num_done:
            return
        share = in_progress.num_done / in_progress.batches
        work = work_of(in_progress.stage, self._workload).times(share)
        key = key_of(in_progress.stage)
        self._measurements = [stage for stage in self._measurements if stage.key != key]
        self._measurements.append(Measurement(key, work, in_progress.seconds, in_progress.start_seconds))

    def _note_lengths(self, stage: Stage, event: BatchDone) -> None:
        """What this run's responses are like is known better from them than from another's."""
        if isinstance(stage, SampleStage):
            self._sample_counts[0] += event.tokens
            self._sample_counts[1] += event.sequences
            mean = self._sample_counts[0] / self._sample_counts[1]
            responses = ResponseLengths(mean, self._workload.responses.longest_tokens, "this run")
            self._workload = replace(self._workload, responses=responses)

    def _rest_of(self, stage: _StageInProgress, pace: Pace) -> Span | None:
        if stage.num_done:
            each = stage.seconds / stage.num_done
            in_flight = min(time.monotonic() - stage.batch_since, each) if stage.batches_remaining else 0.0
            return Span.around(each * stage.batches_remaining, _BY_ITS_OWN_BATCHES).less(in_flight)
        work = work_of(stage.stage, self._workload).times(stage.batches_remaining / max(stage.batches, 1))
        span = pace.span(key_of(stage.stage), work)
        return None if span is None else span.less(time.monotonic() - stage.since)


def run_clock(
    preparation: Preparation, run: RunDirectory, *, first_prompt: int = 0, ready_seconds: float | None = None
) -> RunClock | None:
    """The clock of a run that is about to continue; None where a checkpoint's forward pass cannot be counted.

    first_prompt: an extension works through the prompts from this number on, and through every stage. ready_seconds:
    since the command began; where it is given and no earlier run tells of every stage, the machine is measured for a
    second or two.
    """
    manifest = preparation.manifest
    run_manifest = run.read_manifest()
    stages = run_manifest.stages
    pending = [
        stage
        for stage in make_plan(manifest.settings, run_manifest.rounding_checks).stages
        if first_prompt or stage.name not in stages or stages[stage.name].state in ("pending", "running")
    ]
    try:
        architectures = architectures_of(preparation)
    except UnknownArchitecture:
        return None
    preparation = replace(preparation, prompts=preparation.prompts[first_prompt:])
    own = architectures[manifest.settings.model.path]
    runs = earlier_runs(run.path.parent, manifest, own)
    workload = expected_workload(preparation, architectures, runs)
    measurements = [stage for earlier in runs for stage in earlier.stages]

    def stages_of_run() -> Sequence[Stage]:
        return plan_of(run.read_manifest()).stages

    clock = RunClock(pending, workload, measurements, stages_of_run=stages_of_run)
    has_server = any(key_of(stage).process == "server" for stage in pending)
    if ready_seconds is None or clock.remaining() is not None or has_server:
        return clock
    calibration = measure_for(preparation, own, pending)
    workload = with_stages_by_layer(workload, pending, calibration)
    starting = Starting.on_this_machine(calibration, ready_seconds)
    return RunClock(pending, workload, measurements, calibration, starting, stages_of_run)
