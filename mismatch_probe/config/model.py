"""What a comparison is: the frozen, typed settings that a run directory records and a resume must match."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mismatch_probe.dtypes import Dtype


def _named(value: object) -> object:
    return Dtype.parse(value) if isinstance(value, str) else value


def _wide(dtype: Dtype) -> Dtype:
    if dtype.is_16_bit:
        raise ValueError(f"{dtype} is too coarse to hold others against; give fp32 or fp64")
    return dtype


DtypeField = Annotated[Dtype, BeforeValidator(_named)]
WideDtypeField = Annotated[DtypeField, AfterValidator(_wide)]
Count = Annotated[int, Field(gt=0, lt=2**31)]
"""What a library that counts in 32 bits can still be given."""
CountOrNone = Annotated[int, Field(ge=0, lt=2**31)]
NumPrompts = Annotated[int, Field(gt=0, le=10_000_000)]
NumSamples = Annotated[int, Field(gt=0, le=100_000)]
Temperature = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
ListAsTuple = Field(strict=False)
"""Files know lists, settings keep tuples; what stands in one is as strict as anywhere."""


def _written_as_pairs(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return value
    raise ValueError('write a pair as [training dtype, inference dtype], for instance pairs = [["bf16", "bf16"]]')


PairField = Annotated[tuple[DtypeField, DtypeField], ListAsTuple]
PairsField = Annotated[tuple[PairField, ...], ListAsTuple, BeforeValidator(_written_as_pairs)]
Attention = Literal["sdpa", "eager", "flash_attention_2"]

DEFAULT_NUM_PROMPTS: Final = 64


class Settings(BaseModel):
    """Frozen; an unknown key is an error, and so is a value of another type: true is no number, and "8" is text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSettings(Settings):
    """The checkpoint: a folder, a hub id, or `demo`."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False


class PromptSettings(Settings):
    """Where prompts come from: a built-in task, a JSONL or parquet file, or a hub data set.

    num_prompts: unset, DEFAULT_NUM_PROMPTS or all of a smaller source; a run records the number it came to.
    """

    source: str = "sums:long"
    num_prompts: NumPrompts | None = None
    chat_template: Literal["auto", "always", "never"] = "auto"


class SamplingSettings(Settings):
    """How mu samples. The probabilities compared are those of the distribution sampled from."""

    samples_per_prompt: NumSamples = 1
    max_new_tokens: Count = 1024
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: CountOrNone = 0
    seed: Seed = 0
    ignore_eos: bool = False


class EngineSettings(Settings):
    """The inference engine (mu); `args` go to the engine unchanged. adapter: the folder of a LoRA adapter it serves."""

    name: Literal["vllm"] = "vllm"
    prefix_caching: bool = False
    batch_sequences: Count | None = None
    prefill: bool = True
    adapter: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class TrainingPathSettings(Settings):
    """How the training path (pi) computes.

    precision: `weights` casts the parameters at load (buffers such as RoPE's inv_freq stay FP32); `to` is
    `model.to(dtype)`, which rounds buffers too; `autocast` keeps FP32 parameters under torch.autocast; `fsdp` is
    FSDP2's MixedPrecisionPolicy(param_dtype=dtype) over FP32 parameters. attention: unset, SDPA, and eager attention
    where SDPA would leave out a part of the architecture; a run records which. adapter: the folder of a LoRA adapter,
    computed beside the weights, or with `adapter_merged` added to them in FP32 before they are brought to the dtype.
    """

    precision: Literal["weights", "to", "autocast", "fsdp"] = "weights"
    attention: Attention | None = None
    log_softmax_dtype: DtypeField = Dtype.FP32
    lm_head_dtype: DtypeField | None = None
    device: str = "auto"
    device_map: str | None = None
    batch_tokens: Count = 16384
    adapter: str | None = None
    adapter_merged: bool = False

    @model_validator(mode="after")
    def _merges_an_adapter(self) -> "TrainingPathSettings":
        if self.adapter_merged and self.adapter is None:
            raise ValueError("adapter_merged merges an adapter, and none is given; set training.adapter to its folder")
        return self


class ReferenceSettings(Settings):
    """The high-precision reference both sides are held against."""

    dtype: WideDtypeField = Dtype.FP32
    rounded_weights: bool = True


class FloorSettings(Settings):
    """How many responses of each sampler the training path scores again to measure its own floors; 0 for none."""

    num_sequences: CountOrNone = 16


class FullVocabularySettings(Settings):
    """At how many positions of each sampler's responses both whole distributions are compared; 0 for none.

    Fewer where the vocabulary or the contexts are large (`mismatch_probe.compare.subsample`).
    """

    positions: CountOrNone = 512


class CompareSettings(Settings):
    """One run of `compare`."""

    model: ModelSettings
    pairs: PairsField = tuple((dtype, dtype) for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32))
    prompts: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    training: TrainingPathSettings = TrainingPathSettings()
    reference: ReferenceSettings = ReferenceSettings()
    floors: FloorSettings = FloorSettings()
    full_vocabulary: FullVocabularySettings = FullVocabularySettings()
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    @model_validator(mode="after")
    def _pairs_are_distinct(self) -> "CompareSettings":
        if not self.pairs:
            raise ValueError("no dtype to compare; give --dtype, or --train-dtype with --infer-dtype")
        if len(set(self.pairs)) != len(self.pairs):
            raise ValueError("the same pair of dtypes is asked for twice")
        return self

    @property
    def infer_dtypes(self) -> tuple[Dtype, ...]:
        return tuple(dict.fromkeys(infer for _, infer in self.pairs))

    @property
    def train_dtypes(self) -> tuple[Dtype, ...]:
        return tuple(dict.fromkeys(train for train, _ in self.pairs))
