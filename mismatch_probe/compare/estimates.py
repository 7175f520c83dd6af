"""What a comparison would do and take: upper bounds of its sizes by arithmetic, and the outlook on time and memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.continuation import with_checks_to_repeat
from mismatch_probe.compare.cost.earlier import (
    MAX_NEW_TOKENS,
    Pace,
    architectures_of,
    earlier_runs,
    expected_workload,
    measure_for,
)
from mismatch_probe.compare.cost.forecast import Forecast, Starting, forecast, span_of_stages
from mismatch_probe.compare.cost.headroom import HEADROOM_KINDS, HeadroomForecast, forecast_headroom
from mismatch_probe.compare.cost.memory import (
    ProcessMemory,
    most_hidden_bytes,
    process_memory,
    stages_by_layer,
    with_stages_by_layer,
)
from mismatch_probe.compare.cost.roofline import Architecture, Calibration, Rates, Span, UnknownArchitecture
from mismatch_probe.compare.cost.stage_work import ResponseLengths, Workload
from mismatch_probe.compare.plan import Plan, make_plan, rounding_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import (
    MOST_NUMBERS,
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    FloorStage,
    FullVocabularyStage,
    RoutingStage,
    ScoreStage,
    Stage,
)
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import HeadroomSettings, headroom_values
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import OutOfMemory
from mismatch_probe.records.run_directory import RunDirectory

_LOGPROB_BYTES = 4
_ID_BYTES = 4
_TEXT_BYTES_PER_TOKEN = 12
_LEG_BYTES_PER_TOKEN = 16
_ROW_BYTES = 1024
_DOCUMENT_BYTES = 16 * 2**20
"""Manifest, summary, report and logs."""


class StageEstimate(BaseModel):
    """One stage by its upper bounds."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    stage: str
    sequences: int
    """Responses."""
    max_tokens: int
    """Of those responses, at most."""
    weight_bytes: int
    """Of the weights that it loads."""


class RoundingCheck(BaseModel):
    """What it takes at most to score all rows by the reference in FP32 and in FP64, whichever the run lacks."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    time: Span
    memory: list[ProcessMemory]
    """Of each process, one after the other."""


class Outlook(BaseModel):
    """A comparison's time and memory, and on what they rest."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    response_tokens: float
    """Of a response on average, as counted here."""
    response_tokens_from: str
    """The earlier run that shows it, or `max_new_tokens` where none does."""
    earlier_runs: list[str]
    """Whose measured stages went into `time`."""
    rates: list[Rates]
    """Measured now."""
    time: Forecast
    memory: list[ProcessMemory]
    by_layer: dict[str, str] = {}
    """The stages that will hold one layer of the weights at a time, and why."""
    hidden_bytes: int = 0
    """Of the hidden states that are on disk meanwhile, at most."""
    rounding_check: RoundingCheck | None = None
    """Of what follows only where a pair would be called a bug by its size alone, in neither `time` nor `memory`; None
    where the run has it already.
    """
    headroom: HeadroomForecast | None = None
    """Of the examination for FP16 that follows; None where none was asked for. `time` leaves it out."""

    @property
    def total(self) -> Span:
        """Of the comparison, and of what follows it."""
        return self.time.total if self.headroom is None else self.time.total + self.headroom.time

    @property
    def processes(self) -> list[ProcessMemory]:
        """The memory of each process, one after the other."""
        return self.memory if self.headroom is None else [*self.memory, self.headroom.memory]


class DryRun(BaseModel):
    """What would be done. Sizes are upper bounds: every response is counted at --max-new-tokens."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    model: str
    architecture: str
    parameters: int
    num_prompts: int
    longest_prompt_tokens: int
    longest_sequence_tokens: int
    stages: list[StageEstimate]
    max_disk_bytes: int
    outlook: Outlook | None
    """Time and memory; None where there is no estimate."""
    no_outlook_because: str
    """Why there is none."""


def look_ahead(
    preparation: Preparation,
    runs: Path,
    stages_done: Sequence[str],
    ready_seconds: float,
    *,
    with_headroom: bool = False,
) -> DryRun:
    """Size up a prepared comparison and look ahead; arguments as those of `outlook`."""
    try:
        prospect = outlook(preparation, runs, stages_done, ready_seconds, with_headroom=with_headroom)
        return estimate(preparation, prospect)
    except (UnknownArchitecture, OutOfMemory) as why:
        return estimate(preparation, None, str(why))


def outlook(
    preparation: Preparation,
    runs: Path,
    names_done: Sequence[str],
    ready_seconds: float,
    *,
    with_headroom: bool = False,
) -> Outlook:
    """Measure this machine for a second or two and look at the runs in the folder `runs`.

    names_done: stages that are recorded already. ready_seconds: since the command began. with_headroom: the checkpoint
    is then examined for FP16.
    """
    manifest, settings = preparation.manifest, preparation.manifest.settings
    plan, checks = make_plan(settings), rounding_plan(settings)
    architectures = architectures_of(preparation)
    own = architectures[settings.model.path]
    calibration = measure_for(preparation, own, [*plan.stages, *checks.stages], HEADROOM_KINDS if with_headroom else ())
    runs_before = earlier_runs(runs, manifest, own)
    workload = expected_workload(preparation, architectures, runs_before)
    workload = with_stages_by_layer(workload, plan.stages, calibration)
    limit = settings.sampling.max_new_tokens
    at_the_limit = replace(workload, responses=ResponseLengths(float(limit), limit, MAX_NEW_TOKENS))
    pace = Pace(calibration, [stage for run in runs_before for stage in run.stages])
    starting = Starting.on_this_machine(calibration, ready_seconds)
    stages: list[Stage] = [stage for stage in plan.stages if stage.name not in names_done]
    return Outlook(
        response_tokens=workload.responses.mean_tokens,
        response_tokens_from=workload.responses.source,
        earlier_runs=[str(run.path) for run in runs_before if run.stages],
        rates=calibration.rates,
        time=forecast(stages, workload, pace, starting),
        memory=process_memory(plan, workload, calibration),
        by_layer=stages_by_layer(plan.stages, workload, calibration),
        rounding_check=_rounding_check(checks, names_done, workload, pace, starting),
        hidden_bytes=int(most_hidden_bytes(at_the_limit, plan.stages)),
        headroom=_headroom(preparation, own, workload.responses, calibration) if with_headroom else None,
    )


def _rounding_check(
    checks: Plan, names_done: Sequence[str], workload: Workload, pace: Pace, starting: Starting
) -> RoundingCheck | None:
    pending = [stage for stage in checks.stages if stage.name not in names_done]
    if not pending:
        return None
    assert pace.calibration is not None
    workload = with_stages_by_layer(workload, checks.stages, pace.calibration)
    return RoundingCheck(
        time=span_of_stages(pending, workload, pace, starting),
        memory=process_memory(checks, workload, pace.calibration),
    )


def headroom_outlook(preparation: Preparation, runs: Path) -> HeadroomForecast | None:
    """What the examination for FP16 behind a comparison takes; measures this machine for a second or two. None where
    there is no estimate.
    """
    try:
        architectures = architectures_of(preparation)
        own = architectures[preparation.manifest.settings.model.path]
        calibration = measure_for(preparation, own, (), HEADROOM_KINDS)
    except (UnknownArchitecture, OutOfMemory):
        return None
    workload = expected_workload(preparation, architectures, earlier_runs(runs, preparation.manifest, own))
    return _headroom(preparation, own, workload.responses, calibration)


def _headroom(
    preparation: Preparation, architecture: Architecture, responses: ResponseLengths, calibration: Calibration
) -> HeadroomForecast:
    settings = parse_settings(HeadroomSettings, headroom_values(preparation.manifest.settings))
    prompt_tokens = [len(prompt.token_ids) for prompt in preparation.prompts]
    return forecast_headroom(settings, architecture, prompt_tokens, responses.mean_tokens, calibration)


def done_stages(run: RunDirectory | None) -> list[str]:
    """Names of the stages that a run which is continued has no more to do."""
    if run is None:
        return []
    manifest = with_checks_to_repeat(run.read_manifest())
    names = [name for name, record in manifest.stages.items() if record.state in ("done", "skipped")]
    return [name for name in names if name not in manifest.growing]


def estimate(preparation: Preparation, outlook: Outlook | None = None, no_outlook_because: str = "") -> DryRun:
    """Size up a prepared comparison."""
    manifest, settings = preparation.manifest, preparation.manifest.settings
    parameters = preparation.parameters
    per_engine = len(preparation.prompts) * settings.sampling.samples_per_prompt
    stages = []
    for stage in make_plan(settings).stages:
        sequences = _num_sequences(stage, per_engine, settings)
        stages.append(
            StageEstimate(
                stage=stage.name,
                sequences=sequences,
                max_tokens=sequences * settings.sampling.max_new_tokens,
                weight_bytes=parameters * stage.side.dtype.num_bytes,
            )
        )
    return DryRun(
        model=manifest.model.name,
        architecture=manifest.model.architecture,
        parameters=parameters,
        num_prompts=len(preparation.prompts),
        longest_prompt_tokens=max(len(prompt.token_ids) for prompt in preparation.prompts),
        longest_sequence_tokens=preparation.longest_sequence,
        stages=stages,
        max_disk_bytes=_max_disk_bytes(preparation, stages) + (0 if outlook is None else outlook.hidden_bytes),
        outlook=outlook,
        no_outlook_because=no_outlook_because,
    )


def _max_disk_bytes(preparation: Preparation, stages: list[StageEstimate]) -> int:
    """Records twice, as parts and merged, whole distributions until they are compared, and documents."""
    settings = preparation.manifest.settings
    prompt_tokens = sum(len(prompt.token_ids) for prompt in preparation.prompts)
    samples = settings.sampling.samples_per_prompt * len(settings.infer_sides)
    response_tokens = len(preparation.prompts) * samples * settings.sampling.max_new_tokens
    token_bytes = _ID_BYTES + _TEXT_BYTES_PER_TOKEN
    records = prompt_tokens * (token_bytes + samples * _ID_BYTES) + response_tokens * token_bytes
    records += sum(stage.max_tokens * _LEG_BYTES_PER_TOKEN + stage.sequences * _ROW_BYTES for stage in stages)
    numbers = MOST_NUMBERS * len(settings.infer_sides) if settings.full_vocabulary.positions else 0
    return 2 * records + _LOGPROB_BYTES * numbers + _DOCUMENT_BYTES


def _num_sequences(stage: Stage, per_engine: int, settings: CompareSettings) -> int:
    """Responses that a stage works through, at most; for whole distributions at one position of each."""
    if isinstance(stage, ScoreStage):
        return per_engine * len(stage.samplers)
    if isinstance(stage, FloorStage):
        return min(per_engine, settings.floors.num_sequences) * len(stage.samplers)
    if isinstance(stage, EngineFloorStage | DecodeAloneStage):
        return min(per_engine, settings.floors.num_sequences)
    if isinstance(stage, EngineRoutingStage | RoutingStage):
        samplers = len(stage.samplers) if isinstance(stage, RoutingStage) else 1
        return min(per_engine, settings.experts.num_sequences or 0) * samplers
    if isinstance(stage, DistributionsStage | FullVocabularyStage):
        return min(per_engine, settings.full_vocabulary.positions)
    return per_engine
