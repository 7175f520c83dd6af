"""How long a comparison takes: each stage's start and work, and which stages hold one layer at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, TypeGuard

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.earlier import FROM_RATES, Pace
from mismatch_probe.compare.cost.roofline import NO_TIME, Calibration, Span, Work
from mismatch_probe.compare.cost.stage_work import (
    Workload,
    computes,
    hidden_bytes,
    key_of,
    loading_work,
    loads_model,
    received_by_rank,
    work_of,
)
from mismatch_probe.compare.stages import FloorStage, ScoreStage, Stage
from mismatch_probe.config.model import HIDDEN_SHARE, EngineSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.vllm.declared import compilation_defaults
from mismatch_probe.notation import write_size

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
    """From the end of the stage before to the first batch; None where nothing measured tells it."""
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
    expected = [_of_stage(stage, workload, pace, starting) for stage in local_stages]
    ready = Span.around(starting.ready_seconds, _SAME_MACHINE)
    summary = _summary(workload, pace)
    dealt_out = [stage for stage in local_stages if _is_dealt_out(stage) and computes(stage, workload)]
    unknown = [stage for stage in dealt_out if not pace.has_seen(key_of(stage))]
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
    span = pace.span(key_of(stage), work)
    assert span is not None, "a calibration always tells"
    start = pace.start_span(key_of(stage)) or starting.span(stage, workload, pace)
    return StageForecast(stage=stage.name, start=start, work=span)


def _summary(workload: Workload, pace: Pace) -> Span:
    tokens = workload.sequences * workload.responses.mean_tokens
    each = _SUMMARY_OPERATIONS + _SUMMARY_TOKEN_OPERATIONS * tokens
    pi, *_ = workload.settings.train_sides
    rates = pace.rates_of("training", pi.dtype)
    return Span.around(rates.seconds(Work(operations=len(workload.settings.pairs) * each)), FROM_RATES)


def stages_by_layer(stages: Sequence[Stage], workload: Workload, calibration: Calibration) -> dict[str, str]:
    """The stages of the reference that will hold one layer at a time, and why."""
    reference = workload.settings.reference
    layered = {}
    for stage in stages:
        side = stage.side
        if side.role != "ref" or side.num_ranks or side.training is None:
            continue
        if side.rounded_to is not None and side.rounded_to == workload.checkpoint_dtype:
            continue
        needs_whole_model = side.training.adapter is not None or side.training.device_map is not None
        if needs_whole_model and not reference.by_layer:
            continue
        device = calibration.rates_of("training", side.dtype).device
        num_bytes = workload.architecture_of(side).parameters * side.dtype.num_bytes
        free = calibration.free_memory_bytes[device]
        if reference.holds_one_layer(num_bytes, free):
            sizes = (
                f"its weights in {side.dtype} take {write_size(num_bytes)}, and {write_size(free)} are free ({device})"
            )
            layered[stage.name] = "reference.by_layer asks for it" if reference.by_layer else sizes
    return layered


def with_stages_by_layer(workload: Workload, stages: Sequence[Stage], calibration: Calibration) -> Workload:
    """The workload that says which stages these are, and whether their hidden states are too many for memory."""
    workload = replace(workload, by_layer=frozenset(stages_by_layer(stages, workload, calibration)))
    on_disk = most_hidden_bytes(workload, stages) > HIDDEN_SHARE * calibration.free_memory_bytes["cpu"]
    return replace(workload, hidden_on_disk=on_disk)


def most_hidden_bytes(workload: Workload, stages: Sequence[Stage]) -> float:
    """Of the hidden states of one of these stages; they are written to disk, whether they are in memory too or not."""
    layered = [stage for stage in stages if isinstance(stage, ScoreStage) and stage.name in workload.by_layer]
    return max((hidden_bytes(stage, workload) for stage in layered), default=0.0)
