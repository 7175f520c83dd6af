"""What a comparison will do: jobs (one child process each), their stages, and the sequences a stage works through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mismatch_probe.config.model import Attention, CompareSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.keys import sequence_seed
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest

TRAINING_PATH: Final = "training-path"
"""The job that scores; every other one is an engine's."""


@dataclass(frozen=True)
class SampleStage:
    """mu samples responses and reports the log-probs it decoded with."""

    dtype: Dtype

    @property
    def name(self) -> str:
        return f"sample-{self.dtype}"

    @property
    def sampler(self) -> str:
        return f"infer-{self.dtype}"

    @property
    def leg(self) -> str:
        return f"infer-{self.dtype}-decode"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("rollouts", self.leg)


@dataclass(frozen=True)
class ReplayStage:
    """mu scores its own responses again by prefill."""

    dtype: Dtype

    @property
    def name(self) -> str:
        return f"replay-{self.dtype}"

    @property
    def leg(self) -> str:
        return f"infer-{self.dtype}-prefill"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class DistributionsStage:
    """mu's whole next-token distributions at some positions: parts only, for the training path to compare its own."""

    dtype: Dtype

    @property
    def name(self) -> str:
        return f"distributions-{self.dtype}"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("distributions",)


@dataclass(frozen=True)
class LoadedModel:
    """What a stage of the training path has loaded; stages in a row with the same one share it.

    attention: another implementation than the settings name, None for theirs.
    """

    dtype: Dtype
    reference: bool = False
    rounded_to: Dtype | None = None
    attention: Attention | None = None


@dataclass(frozen=True)
class ScoreStage:
    """The training path scores the responses of `samplers`: pi, or the reference on weights as given or rounded."""

    dtype: Dtype
    samplers: tuple[str, ...]
    reference: bool = False
    rounded_to: Dtype | None = None

    @property
    def leg(self) -> str:
        if not self.reference:
            return f"train-{self.dtype}"
        return f"ref-{self.dtype}" + (f"-weights-{self.rounded_to}" if self.rounded_to else "")

    @property
    def model(self) -> LoadedModel:
        return LoadedModel(self.dtype, self.reference, self.rounded_to)

    @property
    def name(self) -> str:
        return f"score-{self.leg}"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class FloorStage:
    """pi scores a few responses of each sampler one by one: `alone`, the same `again`, or with other attention."""

    dtype: Dtype
    samplers: tuple[str, ...]
    change: Literal["alone", "again", "other-attention"]
    attention: Attention | None = None

    @property
    def leg(self) -> str:
        return f"train-{self.dtype}-{self.change}"

    @property
    def model(self) -> LoadedModel:
        return LoadedModel(self.dtype, attention=self.attention)

    @property
    def name(self) -> str:
        return f"score-{self.leg}"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class WholeVocabularyStage:
    """pi's whole distributions against those of mu in `infer`; what is recorded is reduced to numbers a position."""

    dtype: Dtype
    infer: Dtype

    @property
    def leg(self) -> str:
        return f"full-{self.dtype}-{self.infer}"

    @property
    def samplers(self) -> tuple[str, ...]:
        return (f"infer-{self.infer}",)

    @property
    def model(self) -> LoadedModel:
        return LoadedModel(self.dtype)

    @property
    def name(self) -> str:
        return f"compare-{self.leg}"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


TrainingStage = ScoreStage | FloorStage | WholeVocabularyStage
LegStage = SampleStage | ReplayStage | TrainingStage
Stage = LegStage | DistributionsStage

_OTHER_ATTENTION: Final[dict[Attention | None, Attention]] = {
    None: "eager",
    "sdpa": "eager",
    "eager": "sdpa",
    "flash_attention_2": "sdpa",
}
"""SDPA and eager check each other; flash attention, which runs in 16 bit alone, is held against SDPA."""


@dataclass(frozen=True)
class Job:
    """Stages that share a child process, and with it a loaded engine."""

    name: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Plan:
    jobs: tuple[Job, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for job in self.jobs for stage in job.stages)

    @property
    def leg_stages(self) -> tuple[LegStage, ...]:
        return tuple(stage for stage in self.stages if not isinstance(stage, DistributionsStage))

    @property
    def distributions_stages(self) -> tuple[DistributionsStage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, DistributionsStage))

    def readers(self, stage: DistributionsStage) -> tuple[WholeVocabularyStage, ...]:
        """The stages that read what `stage` leaves as parts."""
        return tuple(
            reader for reader in self.stages if isinstance(reader, WholeVocabularyStage) and reader.infer == stage.dtype
        )

    @property
    def sample_stages(self) -> tuple[SampleStage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, SampleStage))

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)


def make_plan(settings: CompareSettings) -> Plan:
    """The jobs of a comparison, a function of its settings alone."""
    jobs = []
    for dtype in settings.infer_dtypes:
        stages: tuple[Stage, ...] = (SampleStage(dtype),)
        if settings.engine.prefill:
            stages += (ReplayStage(dtype),)
        if settings.full_vocabulary.positions:
            stages += (DistributionsStage(dtype),)
        jobs.append(Job(f"engine-{dtype}", stages))
    jobs.append(Job(TRAINING_PATH, tuple(_training_stages(settings))))
    return Plan(tuple(jobs))


def _training_stages(settings: CompareSettings) -> list[TrainingStage]:
    everyone = tuple(f"infer-{dtype}" for dtype in settings.infer_dtypes)
    reference = settings.reference.dtype
    stages: list[TrainingStage] = [ScoreStage(reference, everyone, reference=True)]
    if settings.reference.rounded_weights:
        for dtype in dict.fromkeys((*settings.train_dtypes, *settings.infer_dtypes)):
            if dtype.is_16_bit:
                samplers = tuple(f"infer-{infer}" for train, infer in settings.pairs if dtype in (train, infer))
                stages.append(ScoreStage(reference, _unique(samplers), reference=True, rounded_to=dtype))
    for dtype in settings.train_dtypes:
        engines = tuple(infer for train, infer in settings.pairs if train == dtype)
        samplers = tuple(f"infer-{infer}" for infer in engines)
        stages.append(ScoreStage(dtype, samplers))
        if settings.full_vocabulary.positions:
            stages += [WholeVocabularyStage(dtype, infer) for infer in engines]
        if settings.floors.num_sequences:
            other = _OTHER_ATTENTION[settings.training.attention]
            stages += [FloorStage(dtype, samplers, change) for change in ("alone", "again")]
            stages.append(FloorStage(dtype, samplers, "other-attention", other))
    return stages


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def sample_requests(
    prompts: Sequence[EncodedPrompt], settings: CompareSettings, stage: SampleStage
) -> list[SampleRequest]:
    """Every response to sample, in the order of the records. All engines get the same seeds."""
    return [
        SampleRequest(
            id=f"{prompt.prompt_id}/{sample}@{stage.sampler}",
            prompt=prompt,
            seed=sequence_seed(settings.sampling.seed, prompt.prompt_id, sample),
        )
        for prompt in prompts
        for sample in range(settings.sampling.samples_per_prompt)
    ]


def model_length(prompts: Sequence[EncodedPrompt], settings: CompareSettings, context_length: int | None) -> int:
    """Longest sequence the engine must hold: the longest prompt, a full response, and the token that a replay adds.

    At the very end of the model's context the response gives way to that token.
    """
    needed = max(len(prompt.token_ids) for prompt in prompts) + settings.sampling.max_new_tokens + 1
    return needed if context_length is None else min(needed, context_length)


def fixed_batches(count: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
