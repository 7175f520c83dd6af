"""What `headroom`, `localize` and `audit` examine: the frozen, typed settings that their documents record."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from mismatch_probe.config.comparison import CompareSettings, PairField, PairName
from mismatch_probe.config.model import (
    Attention,
    Count,
    CountOrNone,
    DtypeField,
    EngineSettings,
    FloorSettings,
    FullVocabularySettings,
    ModelSettings,
    NumSamples,
    PromptSettings,
    ReferenceSettings,
    SamplingSettings,
    Seed,
    Settings,
    TrainingPathSettings,
)
from mismatch_probe.config.sides import Address
from mismatch_probe.config.train import ObjectiveSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.stats.results import LEVEL

HEADROOM_PROMPTS: Final = 8
HEADROOM_MOST_TOKENS: Final = 256
"""Of a response where a run's settings are taken; its time grows with them, in FP32 and at every loss scale."""


class HeadroomPrompts(PromptSettings):
    """Prompts as `compare` takes them; num_prompts: unset, DEFAULT_NUM_PROMPTS or all of a smaller source."""

    source: str = "sums:medium"


class HeadroomSampling(SamplingSettings):
    """How the FP32 model samples the responses; a group of several a prompt, as a policy gradient needs."""

    samples_per_prompt: NumSamples = 4
    max_new_tokens: Count = 128


class HeadroomSettings(Settings):
    """One examination."""

    model: ModelSettings
    prompts: HeadroomPrompts = HeadroomPrompts()
    sampling: HeadroomSampling = HeadroomSampling()
    reward: str | None = None
    """As `train`'s; unset, the task's own check."""
    objective: ObjectiveSettings = ObjectiveSettings()
    attention: Attention | None = None
    """Of the 16-bit runs; unset, SDPA, and eager attention where SDPA would leave out a part of the architecture. The
    FP32 run is eager, where every product is seen.
    """
    device: str = "auto"
    batch_tokens: Count = 1024
    """Padded size of a forward pass."""
    weights_only: bool = False


def headroom_values(run: CompareSettings) -> dict[str, Any]:
    """What a comparison ran with, as far as an examination asks for it; its responses are shorter."""
    sampling = run.sampling.model_dump(include={"max_new_tokens", "temperature", "seed"})
    return {
        "model": run.model.model_dump(),
        "prompts": run.prompts.model_dump(include={"source", "chat_template"}),
        "sampling": sampling | {"max_new_tokens": min(sampling["max_new_tokens"], HEADROOM_MOST_TOKENS)},
        "attention": run.training.attention,
        "device": run.training.device,
    }


LOCALIZE_PROMPTS: Final = 16
DEFAULT_BATCH_TOKENS: Final = 2048


class LocalizeSettings(Settings):
    """One run of `localize`."""

    model: ModelSettings
    train_dtype: DtypeField = Dtype.BF16
    infer_dtype: DtypeField = Dtype.BF16
    pair: PairField | None = None
    """The names of the run's sides that these settings describe; unset, only their dtypes are known."""
    prompts: PromptSettings = PromptSettings(num_prompts=LOCALIZE_PROMPTS)
    sampling: SamplingSettings = SamplingSettings(max_new_tokens=128)
    engine: EngineSettings = EngineSettings()
    training: TrainingPathSettings = TrainingPathSettings(batch_tokens=DEFAULT_BATCH_TOKENS)
    modules: bool = False
    """Every module, not only every block."""
    interventions: bool = True
    """Also measure what higher precision of a part would gain."""
    switches: bool = False
    """Also what other ways to run the engine would, each of which is a start of its own."""
    most_stored_bytes: int = Field(default=4 * 2**30, gt=0, lt=2**63)
    """Activations kept on disk at a time; sequences that do not fit are left out of the attribution."""
    confidence: float = Field(default=LEVEL, gt=0.5, lt=1)

    @property
    def names(self) -> PairName:
        """Of the training side and the engine's: those of their dtypes, where they have none of their own."""
        return self.pair or (self.train_dtype, self.infer_dtype)

    @model_validator(mode="after")
    def _plain_weights(self) -> Self:
        if self.engine.adapter is not None or self.training.adapter is not None:
            raise ValueError(
                "localize looks into plain weights; merge the adapter into a checkpoint, and leave engine.adapter and "
                "training.adapter unset"
            )
        return self

    @model_validator(mode="after")
    def _plain_sampling(self) -> Self:
        if (self.sampling.temperature, self.sampling.top_p, self.sampling.top_k) != (1.0, 1.0, 0):
            raise ValueError(
                "localize compares the model's own probabilities; leave temperature, top_p and top_k unset"
            )
        return self

    def as_comparison(self) -> CompareSettings:
        """The same two sides for what prepares a comparison; hooks need an engine without compiled graphs."""
        engine = self.engine.model_copy(update={"args": {**self.engine.args, "enforce_eager": True}})
        return CompareSettings(
            model=self.model,
            pairs=((self.train_dtype, self.infer_dtype),),
            prompts=self.prompts,
            sampling=self.sampling,
            engine=engine,
            training=self.training,
            reference=ReferenceSettings(rounded_weights=False),
            floors=FloorSettings(num_sequences=0),
            full_vocabulary=FullVocabularySettings(positions=0),
            confidence=self.confidence,
        )


def localize_values(run: CompareSettings) -> dict[str, Any]:
    """What a comparison ran with, for a closer look: fewer prompts, small batches, the model's own probabilities.

    The dtypes are left out where the run has several pairs.
    """
    values = run.model_dump(mode="json", include={"model", "prompts", "engine", "training", "confidence"})
    values["prompts"]["num_prompts"] = min(run.prompts.num_prompts or LOCALIZE_PROMPTS, LOCALIZE_PROMPTS)
    values["training"]["ranks"] = None
    values["training"]["batch_tokens"] = min(run.training.batch_tokens, DEFAULT_BATCH_TOKENS)
    values["sampling"] = run.sampling.model_dump(include={"max_new_tokens", "seed", "ignore_eos"})
    if len(run.pairs) == 1 and not (run.train or run.infer):
        values["train_dtype"], values["infer_dtype"] = run.pairs[0]
    return values


def values_of_pair(run: CompareSettings, text: str) -> dict[str, Any]:
    """As `localize_values`, for a pair of the run's sides written `TRAIN/INFER`, with their own settings.

    Raises:
        UsageError: the run has no such pair, or a side computes nothing here or loads another checkpoint.
    """
    pairs = {"/".join(pair): pair for pair in run.pairs}
    if text not in pairs:
        raise UsageError(f"--pair {text!r} is none of the run's; give one of {', '.join(pairs)}")
    pi, mu = run.pi(pairs[text][0]), run.mu(pairs[text][1])
    for side in (pi, mu):
        if side.logged:
            raise UsageError(
                f"{side.name} was logged elsewhere and computes nothing here; give --model and --out instead"
            )
        if not side.is_computed_here:
            raise UsageError(
                f"{side.name} is a server, which nothing can look into; give --model and --out to look into the engine "
                "that runs here"
            )
        if side.model != run.model:
            raise UsageError(
                f"localize looks into one checkpoint on both sides, and {side.name} loads {side.model.path} where the "
                f"run has {run.model.path}; compare their weights, or give --model and --out to look into one of them"
            )
    assert pi.training is not None
    assert mu.engine is not None
    own = {"training": pi.training.model_dump(mode="json"), "engine": mu.engine.model_dump(mode="json")}
    own["training"]["ranks"] = None
    own["training"]["batch_tokens"] = min(pi.training.batch_tokens, DEFAULT_BATCH_TOKENS)
    names: dict[str, Any] = {} if pairs[text] == (pi.dtype, mu.dtype) else {"pair": pairs[text]}
    return {**localize_values(run), **own, "train_dtype": pi.dtype, "infer_dtype": mu.dtype, **names}


AUDIT_PROMPTS: Final = 32
AUDIT_TOKENS: Final = 128


class AuditPrompts(PromptSettings):
    """Prompts as `compare` takes them; num_prompts: unset, AUDIT_PROMPTS or all of a smaller source."""


class AuditedServer(Settings):
    """The server that is audited, and how it is asked; no key stands here."""

    url: Address
    model: Annotated[str, Field(min_length=1)] | None = None
    """The name to ask for; unset, the only one that is served."""
    adapter: str | None = None
    """The folder of the LoRA adapter that it should serve."""
    chat: bool = False
    """Whether it is given messages, which it puts into its own chat template, in place of token ids."""
    concurrency: Count = 16
    timeout_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 600.0
    tries: Count = 6
    key_variable: str | None = None
    """The environment variable that holds the key; unset, the usual one."""


class AuditSampling(Settings):
    """How the server is asked to sample, which is what its tokens are held against."""

    samples_per_prompt: NumSamples = 1
    max_new_tokens: Count = AUDIT_TOKENS
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    """0 is greedy: the likeliest token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: CountOrNone = 0
    seed: Seed = 0
    ignore_eos: bool = False
    noise: Literal["unknown", "vllm-cpu"] = "unknown"
    """The random numbers that a seed stands for in the server: known, each token can be predicted."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class AuditSettings(Settings):
    """One audit of a server by its tokens."""

    model: ModelSettings
    server: AuditedServer
    dtype: DtypeField = Dtype.BF16
    """The dtype that the server should compute in."""
    prompts: AuditPrompts = AuditPrompts()
    sampling: AuditSampling = AuditSampling()
    headers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Texts, such as system prompts, that may stand before the prompts without being asked for."""
    device: str = "auto"
    batch_tokens: Count = DEFAULT_BATCH_TOKENS
    confidence: float = Field(default=LEVEL, gt=0.5, lt=1)


def audit_values(run: CompareSettings) -> dict[str, Any]:
    """What a comparison ran with, as far as an audit asks for it: its checkpoint and its prompts."""
    return {
        "model": run.model.model_dump(),
        "prompts": run.prompts.model_dump(include={"source", "chat_template"}),
        "device": run.training.device,
    }
