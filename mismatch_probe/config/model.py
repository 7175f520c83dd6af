"""The parts of every command's settings: frozen, typed, recorded in a run, and matched by a resume."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mismatch_probe.dtypes import Dtype


def _dtype_by_name(value: object) -> object:
    return Dtype.parse(value) if isinstance(value, str) else value


def _wide(dtype: Dtype | Literal["none"]) -> Dtype | Literal["none"]:
    if dtype != "none" and not dtype.can_be_reference:
        raise ValueError(f"{dtype} is too coarse to hold others against; give fp32 or fp64")
    return dtype


DtypeField = Annotated[Dtype, BeforeValidator(_dtype_by_name)]
ReferenceDtypeField = Annotated[
    Dtype | Literal["none"],
    BeforeValidator(lambda value: value if value == "none" else _dtype_by_name(value)),
    AfterValidator(_wide),
]
Count = Annotated[int, Field(gt=0, lt=2**31)]
"""What a library that counts in 32 bits can still be given."""
CountOrNone = Annotated[int, Field(ge=0, lt=2**31)]
NumPrompts = Annotated[int, Field(gt=0, le=10_000_000)]
NumSamples = Annotated[int, Field(gt=0, le=100_000)]
Temperature = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
ListAsTuple = Field(strict=False)
"""Files know lists, settings keep tuples; what stands in one is as strict as anywhere."""


Attention = Literal["sdpa", "eager", "flash_attention_2"]
CorrectionName = Literal["none", "token-tis", "icepop", "seq-is", "seq-tis", "seq-mis"]
EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}$")]
"""`vllm`, `server`, or one that an installed package brings; a run is read where that package is absent."""
Offload = Literal["cpu", "disk"]
Precision = Literal["weights", "to", "autocast", "fsdp"]

DEFAULT_NUM_PROMPTS: Final = 64
CPU_PASS_TOKENS: Final = 3072
"""Rows times longest of the training path's pass on a processor's core in 16 bits, half as many in 32: what a layer
passes on stays in the core's caches.
"""
WEIGHTS_SHARE: Final = 0.9
"""Of the free memory, what weights may take; the rest is for a pass over some responses."""
HIDDEN_SHARE: Final = 0.25
"""Of the host's free memory, what hidden states between two layers may take; more of them stand on disk."""


class Settings(BaseModel):
    """Frozen; an unknown key is an error, and so is a value of another type: true is no number, and "8" is text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSettings(Settings):
    """The checkpoint: a folder, a hub id, or `demo`."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False


class PromptSettings(Settings):
    """Where prompts come from: a built-in task, a JSONL or parquet file, or a hub data set."""

    source: str = "sums:long"
    num_prompts: NumPrompts | None = None
    """Unset, DEFAULT_NUM_PROMPTS or all of a smaller source; a run records the number it came to."""
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


@dataclass(frozen=True)
class PassedAs:
    """Of a field: vLLM's argument of this name gets its value where that is not None, and cannot be given otherwise."""

    argument: str


class EngineSettings(Settings):
    """The engine (mu)."""

    name: EngineName = "vllm"
    prefix_caching: Annotated[bool, PassedAs("enable_prefix_caching")] = False
    batch_sequences: Count | None = None
    """Responses in a batch."""
    prefill: bool = True
    """Whether responses are scored again by prefill."""
    adapter: str | None = None
    """The folder of a LoRA adapter that it serves."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The engine's own arguments."""

    @model_validator(mode="after")
    def _server_has_an_address(self) -> Self:
        if self.is_remote and "url" not in self.args:
            raise ValueError("a server is a side of a comparison with an address: --infer NAME:url=http://HOST:PORT")
        return self

    @classmethod
    def passed_fields(cls) -> dict[str, str]:
        """vLLM's arguments that fields are passed as (`PassedAs`), and the names of the fields."""
        return {
            passed.argument: name
            for name, declared in cls.model_fields.items()
            for passed in declared.metadata
            if isinstance(passed, PassedAs)
        }

    @property
    def num_ranks(self) -> int:
        """How many processes of this command's run the engine together (vLLM's `external_launcher`); 0 where it starts
        its own.
        """
        if self.args.get("distributed_executor_backend") != "external_launcher":
            return 0
        return prod(int(self.args.get(name) or 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))

    @property
    def is_remote(self) -> bool:
        """Whether it runs elsewhere and is asked over HTTP."""
        return self.name == "server"


class TrainingPathSettings(Settings):
    """How the training path (pi) computes."""

    precision: Precision = "weights"
    """`weights` casts the parameters at load (buffers such as RoPE's inv_freq stay FP32); `to` is `model.to(dtype)`,
    which rounds buffers too; `autocast` keeps FP32 parameters under torch.autocast; `fsdp` is FSDP2's
    MixedPrecisionPolicy(param_dtype=dtype) over FP32 parameters.
    """
    attention: Attention | None = None
    """Unset, SDPA, and eager attention where SDPA would leave out a part of the architecture; a run records which."""
    log_softmax_dtype: DtypeField = Dtype.FP32
    lm_head_dtype: DtypeField | None = None
    device: str = "auto"
    device_map: str | None = None
    offload: Offload | None = None
    """Where a device map may put what the GPUs do not hold, `cpu`, or `disk` too; unset, nowhere."""
    batch_tokens: Count = 16384
    adapter: str | None = None
    """The folder of a LoRA adapter."""
    adapter_merged: bool = False
    """Whether the adapter is added to the weights in FP32 before they are brought to the dtype."""
    ranks: Count | None = None
    """How many processes hold the model, each a part of every weight (FSDP2), which changes no arithmetic; unset, one
    process holds all.
    """
    tensor_parallel: Count = 1
    """How many of the ranks divide each product, which makes it another pi."""

    @property
    def num_ranks(self) -> int | None:
        """How many processes hold the model; None where one holds it all, and no process group is needed."""
        return self.ranks or (self.tensor_parallel if self.tensor_parallel > 1 else None)

    @model_validator(mode="after")
    def _ranks_are_divided(self) -> "TrainingPathSettings":
        if self.num_ranks is not None and self.num_ranks % self.tensor_parallel:
            raise ValueError(
                f"{self.num_ranks} ranks cannot be divided into groups of tensor_parallel = {self.tensor_parallel}; "
                "make ranks a multiple of it"
            )
        return self

    @model_validator(mode="after")
    def _merges_an_adapter(self) -> "TrainingPathSettings":
        if self.adapter_merged and self.adapter is None:
            raise ValueError("adapter_merged merges an adapter, and none is given; set training.adapter to its folder")
        return self


class ReferenceSettings(Settings):
    """The high-precision reference that both sides are compared with; a run may have none."""

    dtype: ReferenceDtypeField = Dtype.FP32
    rounded_weights: bool = True
    by_layer: bool | None = None
    """Whether one decoder layer's weights are held at a time, over all responses; unset, where the whole would not fit
    the memory that is free. A run records which, and why.
    """

    def holds_one_layer(self, weight_bytes: int, free_bytes: int) -> bool:
        """Whether a reference whose weights take so much is computed layer by layer, on a device with so much free."""
        return weight_bytes > WEIGHTS_SHARE * free_bytes if self.by_layer is None else self.by_layer


class FloorSettings(Settings):
    """How many responses of each sampler the training path scores again to measure its own floors; 0 for none."""

    num_sequences: CountOrNone = 16


class ExpertSettings(Settings):
    """Of how many responses of each engine's side both sides' choice of experts is recorded; 0 for none.

    Unset, as many as `floors.num_sequences` where the checkpoint is a mixture of experts.
    """

    num_sequences: CountOrNone | None = None


class FullVocabularySettings(Settings):
    """At how many positions of each sampler's responses both whole distributions are compared; 0 for none.

    Fewer where the vocabulary or the contexts are large (`mismatch_probe.compare.stages`).
    """

    positions: CountOrNone = 512


class EvaluationSettings(Settings):
    """What `evaluate` adds to a comparison."""

    reward: str | None = None
    """As `task.reward` of training."""
    sample_pi: bool = False
    """Whether responses are sampled on the training path as well."""


LoggedSide = Literal["mu", "pi"]
PairSide = Literal["infer", "train"]
TokenIds = Annotated[tuple[CountOrNone, ...], Field(strict=False)]


class DeclaredPolicy(Settings):
    """How one side of a log computed its log-probs, as the user declares it.

    top_p, top_k, min_p: the log's probabilities are normalised over what they keep.
    """

    dtype: DtypeField = Dtype.BF16
    temperature: Temperature | None = None
    """Unset, what the log says of each response, and 1 where it says nothing."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: CountOrNone = 0
    min_p: float = Field(default=0.0, ge=0, le=1)


class KnownWeights(Settings):
    """Weights that a side may have had instead: those of `version`, a checkpoint's folder or a LoRA adapter's."""

    version: str
    checkpoint: str | None = None
    adapter: str | None = None


class ExplainSettings(Settings):
    """A log's sides against one checkpoint, given as a folder."""

    model: ModelSettings
    mu: DeclaredPolicy = DeclaredPolicy()
    pi: DeclaredPolicy = DeclaredPolicy()
    weights: tuple[KnownWeights, ...] = Field(default=(), strict=False)
    """Other weights that are tried."""
    headers: tuple[TokenIds, ...] = Field(default=(), strict=False)
    """Token ids that may stand before a prompt, such as another system prompt's."""
    header_texts: tuple[str, ...] = Field(default=(), strict=False)
    """The same as texts, which the checkpoint's tokenizer encodes."""
    chat_template: bool = True
    """Whether headers are taken from the checkpoint's own template too."""
    adapter: str | None = None
    device: str = "auto"
    device_map: str | None = None
    batch_tokens: Count = 16384


DEFAULT_CANDIDATES = 256


class SanitySettings(Settings):
    """The first `candidates` problems of the task are tried with `solve_samples` responses each; those solved at least
    `keep_low` and at most `keep_high` of the time are kept, up to task.num_problems of them.
    """

    candidates: NumPrompts = DEFAULT_CANDIDATES
    solve_samples: NumSamples = 40
    keep_low: float = Field(default=0.2, ge=0, le=1)
    keep_high: float = Field(default=0.8, ge=0, le=1)

    @model_validator(mode="after")
    def _keeps_something(self) -> "SanitySettings":
        if self.keep_low > self.keep_high:
            raise ValueError(f"--keep-low {self.keep_low:g} lies above --keep-high {self.keep_high:g}")
        return self
