"""The plan of a comparison: its jobs (one child process each), their stages, the sequences and batches of each stage.

Recorded batches are skipped; each new one is recorded and announced.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.cost.roofline import ProcessName
from mismatch_probe.compare.stages import (
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    FloorChange,
    FloorStage,
    FullVocabularyStage,
    LegStage,
    ReplayStage,
    RoutingStage,
    SampleStage,
    ScoreStage,
    Stage,
    TrainingStage,
)
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import REFERENCE_DTYPES
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.environment import sequence_seed
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import Parts, RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest, ScoredSequence, TokenSequence
from mismatch_probe.records.tables import leg_table

TRAINING_PATH: Final = "training-path"
"""The names of the jobs that score begin with it; every other job is an engine's."""
ROUNDING_CHECK: Final = f"{TRAINING_PATH}-rounding"
"""The names of the jobs begin with it that measure what rounding in FP32 does; a run does without what they fail at."""


@dataclass(frozen=True)
class PlannedJob:
    """The stages that share a child process and its loaded engine."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def process(self) -> ProcessName:
        """What the job's process holds in memory; the process for a server only sends requests."""
        if self.name.startswith(TRAINING_PATH):
            return "training"
        engine = self.stages[0].side.engine
        return "server" if engine is not None and engine.is_remote else "engine"

    @property
    def num_ranks(self) -> int:
        """The number of ranks that hold its models together; 0 where one process holds them."""
        return self.stages[0].side.num_ranks if self.stages else 0

    @property
    def is_rounding_check(self) -> bool:
        return self.name.startswith(ROUNDING_CHECK)

    @property
    def starts_engine(self) -> bool:
        return self.process == "engine"


@dataclass(frozen=True)
class Plan:
    jobs: tuple[PlannedJob, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for job in self.jobs for stage in job.stages)

    @property
    def leg_stages(self) -> tuple[LegStage, ...]:
        return tuple(stage for stage in self.stages if not isinstance(stage, DistributionsStage))

    @property
    def distributions_stages(self) -> tuple[DistributionsStage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, DistributionsStage))

    def readers(self, stage: DistributionsStage) -> tuple[FullVocabularyStage, ...]:
        """The stages that read the parts of `stage`."""
        return tuple(
            reader for reader in self.stages if isinstance(reader, FullVocabularyStage) and reader.mu == stage.side
        )

    @property
    def sample_stages(self) -> tuple[SampleStage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, SampleStage))

    def job(self, name: str) -> PlannedJob:
        return next(job for job in self.jobs if job.name == name)


def plan_of(manifest: Manifest) -> Plan:
    """The plan of a run, with what it found to be missing once its pairs were judged."""
    return make_plan(manifest.settings, manifest.rounding_checks)


def make_plan(settings: CompareSettings, rounding_checks: Sequence[str] = ()) -> Plan:
    """Plan the jobs of a comparison, which follow from its settings and from the training sides to check."""
    jobs = []
    for mu in settings.infer_sides:
        assert mu.engine is not None
        stages: tuple[Stage, ...] = (SampleStage(mu),)
        if mu.engine.prefill and not mu.logged:
            stages += (ReplayStage(mu),)
            if settings.floors.num_sequences and mu.is_computed_here:
                stages += (EngineFloorStage(mu, "alone"),)
                stages += (EngineFloorStage(mu, "cached"),) if mu.engine.prefix_caching else ()
        if settings.floors.num_sequences and not mu.logged:
            stages += (DecodeAloneStage(mu),)
        if settings.experts.num_sequences and mu.is_computed_here:
            stages += (EngineRoutingStage(mu),)
        if settings.full_vocabulary.positions and mu.is_computed_here:
            stages += (DistributionsStage(mu),)
        jobs.append(PlannedJob(mu.job, stages))
    training_stages = _training_stages(settings)
    jobs += _training_jobs(training_stages, TRAINING_PATH)
    names = {stage.name for stage in training_stages}
    checks = [stage for stage in _rounding_stages(settings, rounding_checks) if stage.name not in names]
    jobs += _training_jobs(checks, ROUNDING_CHECK)
    plan = Plan(tuple(jobs))
    _require_a_leg_each(plan)
    return plan


def rounding_plan(settings: CompareSettings) -> Plan:
    """The jobs that a run gets at most once its pairs are judged, if each of them is called a bug by its size."""
    plan = make_plan(settings, [pi.name for pi in settings.train_sides])
    return Plan(tuple(job for job in plan.jobs if job.is_rounding_check))


def _rounding_stages(settings: CompareSettings, names: Sequence[str]) -> Iterator[ScoreStage]:
    """The stages of the reference in FP32 and in FP64, on the weights of these training sides and all their pairs."""
    firsts: list[Side] = []
    for pi in settings.train_sides:
        if pi.name not in names or any(pi.has_weights_of(first) for first in firsts):
            continue
        firsts.append(pi)
        engines = [settings.mu(infer) for train, infer in settings.pairs if settings.pi(train).has_weights_of(pi)]
        for dtype in reversed(REFERENCE_DTYPES):
            yield ScoreStage(settings.reference_in(dtype, pi), _sampler_names(engines))


def _training_jobs(stages: Sequence[TrainingStage], what: str) -> Iterator[PlannedJob]:
    """The jobs of the training path: one process for models without ranks, and a job for each number of ranks."""
    for num_ranks in sorted({stage.side.num_ranks for stage in stages}):
        name = f"{what}-ranks-{num_ranks}" if num_ranks else what
        yield PlannedJob(name, tuple(stage for stage in stages if stage.side.num_ranks == num_ranks))


def _training_stages(settings: CompareSettings) -> list[TrainingStage]:
    stages: list[TrainingStage] = list(_reference_stages(settings))
    for pi in settings.train_sides:
        engines = tuple(settings.mu(infer) for train, infer in settings.pairs if train == pi.name)
        samplers = tuple(mu.sampler for mu in engines)
        stages.append(ScoreStage(pi, samplers))
        if pi.logged:
            continue
        if settings.full_vocabulary.positions:
            stages += [FullVocabularyStage(pi, mu) for mu in engines if mu.is_computed_here]
        own_engines = tuple(mu for mu in engines if mu.is_computed_here)
        if settings.experts.num_sequences and own_engines:
            stages.append(RoutingStage(pi, own_engines))
        if settings.floors.num_sequences:
            stages += [FloorStage(pi, samplers, change) for change in get_args(FloorChange)]
    return stages


def _reference_stages(settings: CompareSettings) -> Iterator[ScoreStage]:
    """The stages of the reference of every training side's weights, on the responses of its pairs."""
    pairs = [(settings.pi(train), settings.mu(infer)) for train, infer in settings.pairs]
    for first in settings.train_sides:
        reference = settings.reference_of(first)
        of_weights = [(pi, mu) for pi, mu in pairs if pi.has_weights_of(first)]
        if reference is None or of_weights[0][0] != first:
            continue
        yield ScoreStage(reference, _sampler_names(mu for _, mu in of_weights))
        if settings.reference.rounded_weights:
            yield from _rounded_stages(settings, of_weights)


def _rounded_stages(settings: CompareSettings, pairs: Sequence[tuple[Side, Side]]) -> Iterator[ScoreStage]:
    """The stages of the reference on the pairs' weights rounded to each of their 16-bit dtypes."""
    for dtype in dict.fromkeys(side.dtype for sides in zip(*pairs, strict=True) for side in sides):
        rounded_reference = settings.reference_of(pairs[0][0], dtype)
        if rounded_reference is not None and dtype.rounds_coarsely:
            yield ScoreStage(rounded_reference, _sampler_names(mu for pi, mu in pairs if dtype in (pi.dtype, mu.dtype)))


def _sampler_names(sides: Iterable[Side]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(side.sampler for side in sides))


def _require_a_leg_each(plan: Plan) -> None:
    for what, names in (
        ("leg", [stage.leg for stage in plan.leg_stages]),
        ("stage", [stage.name for stage in plan.stages]),
    ):
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise UsageError(f"the names of two sides make the same {what}, {duplicate}; give one of them another name")


def sample_requests(prompts: Sequence[EncodedPrompt], sampling: SamplingSettings, mu: Side) -> list[SampleRequest]:
    """The requests of all responses to sample, in the order of the records; all engines get the same seeds."""
    return [
        SampleRequest(
            id=mu.row_id(prompt.prompt_id, sample),
            prompt=prompt,
            seed=sequence_seed(sampling.seed, prompt.prompt_id, sample),
        )
        for prompt in prompts
        for sample in range(sampling.samples_per_prompt)
    ]


def model_length(prompts: Sequence[EncodedPrompt], settings: CompareSettings, context_length: int | None) -> int:
    """The longest sequence of the engine: the longest prompt, a full response, and the token that a replay adds.

    At the end of the model's context the response is a token shorter.
    """
    length = max(len(prompt.token_ids) for prompt in prompts) + settings.sampling.max_new_tokens + 1
    return length if context_length is None else min(length, context_length)


def fixed_batches(count: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobStarted(Event):
    """A process begins to load the model of its first stage."""

    kind: Literal["job_started"] = "job_started"
    process: ProcessName
    stages: list[str]


class StageStarted(Event):
    kind: Literal["stage_started"] = "stage_started"
    stage: str
    batches: int
    batches_done: int


class EffectiveSettings(Event):
    """The settings of a stage, read back from the engine or model that runs."""

    kind: Literal["effective_settings"] = "effective_settings"
    stage: str
    settings: dict[str, Any]


class RequestsDone(Event):
    """The progress of a batch, which does not show the remaining time: the longest requests end late."""

    kind: Literal["requests_done"] = "requests_done"
    stage: str
    done: int
    of: int


class LayersDone(Event):
    """The progress of a reference that takes all batches through one layer after the other."""

    kind: Literal["layers_done"] = "layers_done"
    stage: str
    done: int
    of: int


class BatchDone(Event):
    kind: Literal["batch_done"] = "batch_done"
    stage: str
    sequences: int
    tokens: int
    seconds: float


class StageDone(Event):
    kind: Literal["stage_done"] = "stage_done"
    stage: str
    skipped: bool = False
    note: str = ""


AnyEvent = Annotated[
    JobStarted | StageStarted | EffectiveSettings | RequestsDone | LayersDone | BatchDone | StageDone,
    Field(discriminator="kind"),
]

parse: Final[Callable[[Any], AnyEvent]] = TypeAdapter(AnyEvent).validate_python
"""The event of a message."""


def send_event(events: Send, event: Event) -> None:
    events(event.model_dump(mode="json"))


BatchOutcome = tuple[dict[str, pa.Table], int]
"""The tables of a batch and its number of response tokens."""
BatchWork = Callable[[list[int]], BatchOutcome]
RoundWork = Callable[[list[list[int]]], list[BatchOutcome]]


def skip(stage: str, why: str, events: Send) -> None:
    """Announce that a stage has nothing to do, with the reason."""
    send_event(events, StageStarted(stage=stage, batches=0, batches_done=0))
    send_event(events, StageDone(stage=stage, skipped=True, note=why))


def run_batches(parts: Parts, stage: str, batches: Sequence[list[int]], work: BatchWork, events: Send) -> None:
    """Work through `batches` (lists of row numbers); `work` returns the tables of a batch and its response tokens."""
    run_rounds(parts, stage, batches, lambda group: [work(rows) for rows in group], events, at_once=1)


def run_rounds(
    parts: Parts, stage: str, batches: Sequence[list[int]], work: RoundWork, events: Send, *, at_once: int
) -> None:
    """`run_batches` where `work` takes `at_once` batches together and returns the outcome of each."""
    parts.open()
    pending = [number for number in range(len(batches)) if not parts.is_done(number)]
    send_event(events, StageStarted(stage=stage, batches=len(batches), batches_done=len(batches) - len(pending)))
    pa.array([])  # pyarrow imports pandas at its first conversion, which is no work of the first batch
    for first in range(0, len(pending), at_once):
        start = time.monotonic()
        batch_numbers = pending[first : first + at_once]
        outcomes = work([batches[number] for number in batch_numbers])
        for number, (tables, tokens) in zip(batch_numbers, outcomes, strict=True):
            parts.write(number, tables)
            time_of_batch = time.monotonic()
            seconds, start = time_of_batch - start, time_of_batch
            send_event(events, BatchDone(stage=stage, sequences=len(batches[number]), tokens=tokens, seconds=seconds))
    send_event(events, StageDone(stage=stage))


def run_scores(
    run: RunDirectory,
    stage: LegStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    score: Callable[[list[TokenSequence]], list[ScoredSequence]],
    events: Send,
) -> None:
    """`run_batches` that records the scores of `score` as a leg."""

    def each(groups: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
        return [score(batch) for batch in groups]

    run_scores_together(run, stage, sequences, batches, each, events, at_once=1)


def run_scores_together(
    run: RunDirectory,
    stage: LegStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    score: Callable[[list[list[TokenSequence]]], list[list[ScoredSequence]]],
    events: Send,
    *,
    at_once: int,
    double: bool = False,
) -> None:
    """`run_scores` where `score` takes `at_once` batches together; a `double` leg is in FP64."""

    def work(groups: list[list[int]]) -> list[BatchOutcome]:
        batches = [[sequences[row] for row in rows] for rows in groups]
        return [
            ({stage.leg: leg_table(batch, scores, double=double)}, sum(len(sequence.token_ids) for sequence in batch))
            for batch, scores in zip(batches, score(batches), strict=True)
        ]

    run_rounds(run.parts(stage.name, stage.outputs), stage.name, batches, work, events, at_once=at_once)
