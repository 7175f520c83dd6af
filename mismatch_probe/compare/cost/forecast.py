"""How long each stage of a comparison takes, from measured rates and earlier runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Final, Self, TypeGuard

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.architecture import Workload
from mismatch_probe.compare.cost.earlier import Measurement
from mismatch_probe.compare.cost.rates import NO_TIME, Calibration, Process, Rates, Span, Work
from mismatch_probe.compare.cost.stage_work import (
    Kind,
    What,
    computes,
    loading_work,
    loads_model,
    received_by_rank,
    what_of,
    work_of,
)
from mismatch_probe.compare.stages import FloorStage, ScoreStage, Stage
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.declared import compilation_defaults

FROM_RATES: Final = 4.0
"""Between a quarter and four times: arithmetic on measured rates. What was seen of each: `reports/cost-model.md`."""
FROM_THE_SAME: Final = 3.0
"""The same kind of stage was measured of the same side, of the same model on the same hardware."""
FROM_ANOTHER_SIDE: Final = 4.0
"""It was measured in another dtype, or with other settings."""
FROM_ANOTHER_KIND: Final = 6.0

_ALIKE: Final[tuple[tuple[Kind, ...], ...]] = (
    ("replay", "engine-floor", "engine-routing", "distributions", "score", "floor", "routing", "full-vocabulary"),
    ("sample", "decode-alone"),
)
"""Kinds that tell of each other where no rates were measured: passes over whole sequences, and steps of one token."""


def _in_proportion(process: Process, dtype: Dtype) -> Rates:
    """No rates, only how stages of one kind compare: a measured one gives the scale."""
    return Rates(
        process=process,
        dtype=dtype,
        device="",
        matrix_flops_per_second=1e11,
        attention_flops_per_second=1e11,
        memory_bytes_per_second=1e10,
        operation_seconds=2e-6,
        disk_bytes_per_second=1e9,
    )


@dataclass(frozen=True)
class Pace:
    """What is known of a machine: its measured rates, and stages that ran on it; either may be missing."""

    calibration: Calibration | None
    measurements: Sequence[Measurement]

    def span(self, what: What, work: Work) -> Span | None:
        """How long a stage takes without its start; None where nothing measured tells."""
        size = self.rates_of(what.process, what.dtype).seconds(work)
        of_process = [stage for stage in self.measurements if self._tells_of(stage.what, what)]
        of_kind = [stage for stage in of_process if stage.what.kind == what.kind]
        levels = [([stage for stage in of_kind if stage.what == what], FROM_THE_SAME), (of_kind, FROM_ANOTHER_SIDE)]
        if self.calibration is None:
            alike = next(kinds for kinds in _ALIKE if what.kind in kinds)
            levels.append(([stage for stage in of_process if stage.what.kind in alike], FROM_ANOTHER_KIND))
        for measurement, factor in levels:
            sizes = [
                (stage, self.rates_of(stage.what.process, stage.what.dtype).seconds(stage.work))
                for stage in measurement
            ]
            sizes = [(stage, its_size) for stage, its_size in sizes if its_size > 0]
            if sizes:
                nearest, its_size = min(sizes, key=lambda pair: abs(log(pair[1] / size)) if size else 0)
                constant = nearest.seconds + (size - its_size if self.calibration else 0)
                return _between(nearest.seconds * size / its_size, constant, factor)
        return None if self.calibration is None else Span.around(size, FROM_RATES)

    def has_seen(self, what: What) -> bool:
        """Whether a stage of the same kind, side and settings was measured."""
        return any(stage.what == what for stage in self.measurements)

    def start_span(self, what: What) -> Span | None:
        """How long it takes from the end of the stage before to this one's first batch; None where nothing tells."""
        alike = [
            stage
            for stage in self.measurements
            if (stage.what.kind, stage.what.manner) == (what.kind, what.manner) and stage.start_seconds is not None
        ]
        alike_in_dtype = [stage for stage in alike if stage.what.dtype == what.dtype] or alike
        if not alike_in_dtype:
            return None
        return Span.around(
            sum(stage.start_seconds or 0.0 for stage in alike_in_dtype) / len(alike_in_dtype), FROM_THE_SAME
        )

    def _tells_of(self, other: What, what: What) -> bool:
        """Of a server only a server does; beside measured rates, only what ran at one of them."""
        if (other.process == "server") != (what.process == "server"):
            return False
        return self.calibration is None or self.calibration.has(other.process, other.dtype)

    def rates_of(self, process: Process, dtype: Dtype) -> Rates:
        if self.calibration is None:
            return _in_proportion(process, dtype)
        return self.calibration.rates_of(process, dtype)


def _between(variable: float, constant: float, factor: float) -> Span:
    """What a measured stage of another size took beyond the arithmetic grows with the size, or was spent once: both are
    in the interval. Without rates all of it may be either.
    """
    low, high = sorted((variable, constant)) if constant > 0 else (variable, variable)
    return Span(low_seconds=low / factor, likely_seconds=sqrt(low * high), high_seconds=high * factor)


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
    """start: from the end of the stage before to the first batch; None where nothing measured tells it. work: its
    batches.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    start: Span | None
    work: Span


class Forecast(BaseModel):
    """ready: until everything is imported and checked. summary: statistics and report. total: of all that is known;
    unknown_starts names the stages whose start is not in it, of_servers those of which nothing is: how fast a server is
    cannot be measured here. over_ranks: those over ranks that no earlier run over as many tells of, and received_bytes
    what each rank is sent meanwhile: how long that takes is not in the time, since nothing here tells how fast ranks
    are connected.
    """

    model_config = ConfigDict(frozen=True)

    ready: Span
    stages: list[StageForecast]
    summary: Span
    total: Span
    unknown_starts: list[str]
    of_servers: list[str] = []
    over_ranks: list[str] = []
    received_bytes: dict[str, int] = {}


@dataclass(frozen=True)
class Starting:
    """What is known of starts that no earlier run shows. ready_seconds: from the command's start until everything was
    imported and its inputs checked. on_cpu: there an engine starts eagerly unless it is told to compile.
    """

    ready_seconds: float
    on_cpu: bool

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
        what = what_of(stage)
        reading = pace.rates_of(what.process, what.dtype).seconds(loading_work(stage, workload))
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
    local_stages = [stage for stage in stages if what_of(stage).process != "server"]
    expected = [_of_stage(stage, workload, pace, starting) for stage in local_stages]
    ready = Span.around(starting.ready_seconds, _SAME_MACHINE)
    summary = _summary(workload, pace)
    dealt_out = [stage for stage in local_stages if _is_dealt_out(stage) and computes(stage, workload)]
    unknown = [stage for stage in dealt_out if not pace.has_seen(what_of(stage))]
    known_spans = [span for stage in expected for span in (stage.start, stage.work) if span is not None]
    return Forecast(
        ready=ready,
        stages=expected,
        summary=summary,
        total=sum((ready, *known_spans, summary), start=NO_TIME),
        unknown_starts=[stage.stage for stage in expected if stage.start is None],
        of_servers=[stage.name for stage in stages if stage not in local_stages],
        over_ranks=[stage.name for stage in unknown],
        received_bytes={stage.name: int(received_by_rank(stage, workload)) for stage in unknown},
    )


def _is_dealt_out(stage: Stage) -> TypeGuard[ScoreStage | FloorStage]:
    """Whether ranks share its passes."""
    return isinstance(stage, ScoreStage | FloorStage) and stage.side.num_ranks > 1


def _of_stage(stage: Stage, workload: Workload, pace: Pace, starting: Starting) -> StageForecast:
    work = work_of(stage, workload)
    if work == Work():
        return StageForecast(stage=stage.name, start=NO_TIME, work=NO_TIME)
    span = pace.span(what_of(stage), work)
    assert span is not None, "a calibration always tells"
    start = pace.start_span(what_of(stage)) or starting.span(stage, workload, pace)
    return StageForecast(stage=stage.name, start=start, work=span)


def _summary(workload: Workload, pace: Pace) -> Span:
    tokens = workload.sequences * workload.responses.mean_tokens
    each = _SUMMARY_OPERATIONS + _SUMMARY_TOKEN_OPERATIONS * tokens
    pi, *_ = workload.settings.train_sides
    rates = pace.rates_of("training", pi.dtype)
    return Span.around(rates.seconds(Work(operations=len(workload.settings.pairs) * each)), FROM_RATES)
