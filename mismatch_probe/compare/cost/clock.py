"""How much of a run is left, while it runs: by the stages that it has done, and by those of earlier runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mismatch_probe.compare.batches import AnyEvent, BatchDone, StageDone, StageStarted
from mismatch_probe.compare.cost.earlier import Measurement, Pace, earlier_runs
from mismatch_probe.compare.cost.forecast import Starting, with_stages_by_layer
from mismatch_probe.compare.cost.memory import architectures_of, expected_workload, measure_for
from mismatch_probe.compare.cost.roofline import NO_TIME, Calibration, Span, UnknownArchitecture, Work
from mismatch_probe.compare.cost.stage_work import ResponseLengths, Workload, key_of, work_of
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import SampleStage, Stage
from mismatch_probe.records.run_directory import RunDirectory

_BY_ITS_OWN_BATCHES: Final = 1.3


@dataclass
class _StageInProgress:
    stage: Stage
    batches: int
    began_with: int
    start_seconds: float
    since: float
    done: int = 0
    seconds: float = 0.0
    batch_since: float = 0.0

    @property
    def left(self) -> int:
        return self.batches - self.began_with - self.done


class RunClock:
    """Hears a run's events; `left` is the time that its stages still need."""

    def __init__(
        self,
        stages: Sequence[Stage],
        workload: Workload,
        earlier_stages: Sequence[Measurement],
        calibration: Calibration | None = None,
        starting: Starting | None = None,
    ) -> None:
        """stages: those still to be run, in their order. calibration, starting: what tells of stages and of starts that
        no earlier run had.
        """
        self._pending_stages = list(stages)
        self._workload = workload
        self._calibration = calibration
        self._starting = starting
        self._measurements = list(earlier_stages)
        self._stage: _StageInProgress | None = None
        self._idle_since = time.monotonic()
        self._sample_counts = [0, 0]

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StageStarted):
            self._start(event)
        elif isinstance(event, BatchDone | StageDone) and self._stage is not None:
            if event.stage != self._stage.stage.name:
                return
            if isinstance(event, BatchDone):
                self._stage.done += 1
                self._stage.batch_since = time.monotonic()
                self._stage.seconds += event.seconds
                self._note_lengths(self._stage.stage, event)
            else:
                self._end(self._stage, skipped=event.skipped)

    def left(self) -> Span | None:
        """Statistics and report not counted; None while nothing measured tells how long a stage to come will take."""
        pace = Pace(self._calibration, self._measurements)
        spans = [self._of(stage, pace) for stage in self._pending_stages]
        if self._stage is None and self._pending_stages and spans[0] is not None:
            start = self._start_of(self._pending_stages[0], pace).likely_seconds
            spans[0] = spans[0].less(min(time.monotonic() - self._idle_since, start))
        if self._stage is not None:
            spans.append(self._rest_of(self._stage, pace))
        known_spans = [span for span in spans if span is not None]
        return sum(known_spans, start=NO_TIME) if len(known_spans) == len(spans) else None

    def _start(self, event: StageStarted) -> None:
        """Stages come in their order: what stands before this one is recorded already."""
        names = [stage.name for stage in self._pending_stages]
        if event.stage not in names:
            return
        now, place = time.monotonic(), names.index(event.stage)
        stage = self._pending_stages[place]
        del self._pending_stages[: place + 1]
        self._stage = _StageInProgress(stage, event.batches, event.batches_done, now - self._idle_since, now)

    def _end(self, in_progress: _StageInProgress, *, skipped: bool) -> None:
        self._stage, self._idle_since = None, time.monotonic()
        if skipped or not in_progress.done:
            return
        share = in_progress.done / in_progress.batches
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

    def _of(self, stage: Stage, pace: Pace) -> Span | None:
        work = work_of(stage, self._workload)
        if work == Work():
            return NO_TIME
        span = pace.span(key_of(stage), work)
        return None if span is None else span + self._start_of(stage, pace)

    def _start_of(self, stage: Stage, pace: Pace) -> Span:
        """What nothing tells, as how long an engine compiles, counts for nothing."""
        if work_of(stage, self._workload) == Work():
            return NO_TIME
        span = pace.start_span(key_of(stage))
        if span is None and self._starting is not None:
            span = self._starting.span(stage, self._workload, pace)
        return span or NO_TIME

    def _rest_of(self, stage: _StageInProgress, pace: Pace) -> Span | None:
        if stage.done:
            each = stage.seconds / stage.done
            in_flight = min(time.monotonic() - stage.batch_since, each) if stage.left else 0.0
            return Span.around(each * stage.left, _BY_ITS_OWN_BATCHES).less(in_flight)
        work = work_of(stage.stage, self._workload).times(stage.left / max(stage.batches, 1))
        span = pace.span(key_of(stage.stage), work)
        return None if span is None else span.less(time.monotonic() - stage.since)


def run_clock(
    preparation: Preparation, run: RunDirectory, *, first_prompt: int = 0, ready_seconds: float | None = None
) -> RunClock | None:
    """The clock of a run that is about to continue; None where a checkpoint's forward pass cannot be counted.

    first_prompt: an extension works through the prompts from this number on, and through every stage. ready_seconds:
    since the command began; where it is given and no earlier run tells of every stage, the machine is measured for a
    second or two.

    Raises:
        UsageError: the checkpoint cannot be read.
        BrokenRecord: the run's manifest cannot be read.
        MismatchProbeError: the device cannot be used.
    """
    manifest = preparation.manifest
    stages = run.read_manifest().stages
    pending = [
        stage
        for stage in make_plan(manifest.settings).stages
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
    clock = RunClock(pending, workload, measurements)
    has_server = any(key_of(stage).process == "server" for stage in pending)
    if ready_seconds is None or clock.left() is not None or has_server:
        return clock
    calibration = measure_for(preparation, own, pending)
    workload = with_stages_by_layer(workload, pending, calibration)
    return RunClock(pending, workload, measurements, calibration, Starting.on_this_machine(calibration, ready_seconds))
