"""What a comparison will do: jobs (one child process each), their stages, and the sequences a stage works through."""

from collections.abc import Sequence
from dataclasses import dataclass

from mismatch_probe.config.model import CompareSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.keys import sequence_seed
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest


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
    def name(self) -> str:
        return f"score-{self.leg}"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


Stage = SampleStage | ReplayStage | ScoreStage


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
        jobs.append(Job(f"engine-{dtype}", stages))
    jobs.append(Job("training-path", tuple(_score_stages(settings))))
    return Plan(tuple(jobs))


def _score_stages(settings: CompareSettings) -> list[ScoreStage]:
    everyone = tuple(f"infer-{dtype}" for dtype in settings.infer_dtypes)
    reference = settings.reference.dtype
    stages = [ScoreStage(reference, everyone, reference=True)]
    if settings.reference.rounded_weights:
        for dtype in dict.fromkeys((*settings.train_dtypes, *settings.infer_dtypes)):
            if dtype in ("fp16", "bf16"):
                samplers = tuple(f"infer-{infer}" for train, infer in settings.pairs if dtype in (train, infer))
                stages.append(ScoreStage(reference, _unique(samplers), reference=True, rounded_to=dtype))
    for dtype in settings.train_dtypes:
        samplers = tuple(f"infer-{infer}" for train, infer in settings.pairs if train == dtype)
        stages.append(ScoreStage(dtype, _unique(samplers)))
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
