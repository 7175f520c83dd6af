"""What a comparison will take, stage by stage, before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeGuard

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.pace import FROM_RATES, Pace
from mismatch_probe.compare.cost.rates import NO_TIME, Calibration, Span, Work
from mismatch_probe.compare.cost.stage_work import (
    computes,
    loading_work,
    loads_model,
    received_by_rank,
    what_of,
    work_of,
)
from mismatch_probe.compare.cost.workload import Workload
from mismatch_probe.compare.stages import FloorStage, ScoreStage, Stage
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.vllm.compilation import compilation_defaults

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
    def here(cls, calibration: Calibration, ready_seconds: float) -> Self:
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
        return Span.within(_share(stage.side) * self.ready_seconds + reading, FROM_RATES)

    def _compiles(self, engine: EngineSettings) -> bool:
        args = {**engine.args, **compilation_defaults(engine.args, on_cpu=self.on_cpu)}
        return args.get("enforce_eager") is not True


def _share(side: Side) -> float:
    if side.engine is not None:
        return _ENGINE_START_SHARE
    return _REFERENCE_START_SHARE if side.role == "ref" and side.rounded_to is None else _MODEL_LOAD_SHARE


def forecast(stages: Sequence[Stage], workload: Workload, pace: Pace, starting: Starting) -> Forecast:
    """Needs a `pace` with a calibration."""
    here = [stage for stage in stages if what_of(stage).process != "server"]
    expected = [_of_stage(stage, workload, pace, starting) for stage in here]
    ready = Span.within(starting.ready_seconds, _SAME_MACHINE)
    summary = _summary(workload, pace)
    dealt_out = [stage for stage in here if _is_dealt_out(stage) and computes(stage, workload)]
    unknown = [stage for stage in dealt_out if not pace.has_seen(what_of(stage))]
    known = [span for stage in expected for span in (stage.start, stage.work) if span is not None]
    return Forecast(
        ready=ready,
        stages=expected,
        summary=summary,
        total=sum((ready, *known, summary), start=NO_TIME),
        unknown_starts=[stage.stage for stage in expected if stage.start is None],
        of_servers=[stage.name for stage in stages if stage not in here],
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
    return Span.within(rates.seconds(Work(operations=len(workload.settings.pairs) * each)), FROM_RATES)
