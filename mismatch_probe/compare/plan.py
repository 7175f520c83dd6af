"""The plan of a comparison: its jobs (one child process each), their stages, and the sequences of each stage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

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
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.environment import sequence_seed
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest

TRAINING_PATH: Final = "training-path"
"""The names of the jobs that score begin with it; every other job is an engine's."""


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


def make_plan(settings: CompareSettings) -> Plan:
    """Plan the jobs of a comparison, which follow from its settings alone."""
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
    jobs += _training_jobs(_training_stages(settings))
    plan = Plan(tuple(jobs))
    _require_a_leg_each(plan)
    return plan


def _training_jobs(stages: Sequence[TrainingStage]) -> Iterator[PlannedJob]:
    """The jobs of the training path: one process for models without ranks, and a job for each number of ranks."""
    for num_ranks in sorted({stage.side.num_ranks for stage in stages}):
        name = f"{TRAINING_PATH}-ranks-{num_ranks}" if num_ranks else TRAINING_PATH
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
