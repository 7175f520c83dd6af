"""What a checkpoint computes for a token, and the sizes of a comparison, before anything is computed."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.provenance.checkpoint import read_config, safetensors_header, text_config, weight_files
from mismatch_probe.records.manifest import Manifest

Lengths = npt.NDArray[np.float64]
"""Tokens of each sequence."""

_MATRIX_NAMES: Final = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Architectures (`model_type`) whose forward pass is held against a count of PyTorch's in the tests."""

_WINDOW_IN_EVERY_LAYER: Final = ("mistral", "mixtral", "phi3", "starcoder2")
"""Where the config names a window and no `layer_types`; elsewhere all layers then count as full attention."""
_EXPERTS: Final = ".experts."
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NO_LAYER: Final = ("embed_tokens.weight", "lm_head.weight")
_NUM_EXPERTS: Final = ("num_experts", "num_local_experts")


class UnknownArchitecture(Exception):  # noqa: N818 - an answer: there is no estimate
    """Why no arithmetic is known for a checkpoint."""


@dataclass(frozen=True)
class Architecture:
    """A decoder of grouped-query attention and feed-forward layers.

    intermediate_size: what a token passes through in a layer, of a mixture in all the experts that it is routed to.
    windows: for each layer how many tokens back attention sees, None for all. parameters: all that are stored.
    token_parameters: those of the layers' matrices that a token is multiplied with. layer_parameters: of the largest
    layer. outside_parameters: of what no layer holds.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    parameters: int
    token_parameters: int
    layer_parameters: int
    outside_parameters: int

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def matrix_flops(self, tokens: float, head_tokens: float) -> float:
        """Of products with weights: 2 a weight and token, and of the head for the tokens that it is computed for."""
        return 2 * self.token_parameters * tokens + 2 * self.hidden_size * self.vocab_size * head_tokens

    def attention_flops(self, lengths: Lengths, *, causal: bool) -> float:
        """Of scores and of the values they weigh, for sequences of these lengths: 4 a query, key, head and dimension.

        causal: keys that a query may not see are not computed, as fused kernels do; otherwise all pairs are.
        """
        layers = Counter(self.windows).items()
        pairs = sum(count * _pairs(lengths, window, causal) for window, count in layers)
        return 4 * self.num_heads * self.head_dim * pairs

    def kv_bytes(self, tokens: float, itemsize: int) -> float:
        """Of the keys and values of so many tokens in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize * tokens


def _pairs(lengths: Lengths, window: int | None, causal: bool) -> float:
    if not causal:
        return float((lengths**2).sum())
    contexts = lengths if window is None else np.minimum(lengths, window)
    return float((contexts * lengths - contexts**2 / 2).sum())


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a checkpoint's folder.

    Raises:
        UnknownArchitecture: no arithmetic is known for it.
        UsageError: its files cannot be read.
    """
    headers = [safetensors_header(path) for path in weight_files(folder)]
    shapes = {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}
    return architecture_of(read_config(folder), shapes)


def architecture_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """The architecture that `config.json` describes and whose weights have these shapes.

    Raises:
        UnknownArchitecture: no arithmetic is known for it.
    """
    kind = config.get("model_type")
    if kind not in _MATRIX_NAMES:
        raise UnknownArchitecture(f"the arithmetic of {kind or 'this architecture'} is not known here")
    if config.get("quantization_config") is not None:
        raise UnknownArchitecture("the weights are quantised, and what their kernels take is not known here")
    if text_config(dict(config)) is not config and config.get("text_config"):
        raise UnknownArchitecture("the model does more than read text")
    heads = _count(config, "num_attention_heads")
    parts = _parameters_by_layer(shapes)
    hidden_size = _count(config, "hidden_size")
    return Architecture(
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config),
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", hidden_size // heads),
        vocab_size=_count(config, "vocab_size"),
        windows=_windows(config),
        parameters=sum(prod(shape) for shape in shapes.values()),
        token_parameters=_token_parameters(config, shapes),
        layer_parameters=max((size for layer, size in parts.items() if layer is not None), default=0),
        outside_parameters=parts[None],
    )


def _parameters_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> Counter[int | None]:
    """Of each layer by its number; None is what no layer holds."""
    parts: Counter[int | None] = Counter()
    for name, shape in shapes.items():
        layer = _LAYER.search(name)
        parts[None if layer is None else int(layer[1])] += prod(shape)
    return parts


def _intermediate_size(config: Mapping[str, Any]) -> int:
    name = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    return _count(config, name) * _count(config, "num_experts_per_tok", 1)


def _token_parameters(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of matrices alone: an embedding is looked up, a norm or a bias is no product, and the head is counted apart."""
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) >= 2 and not name.endswith(_NO_LAYER)}
    in_experts = sum(size for name, size in matrices.items() if _EXPERTS in name)
    dense = sum(matrices.values()) - in_experts
    if not in_experts:
        return dense
    num_experts = _count(config, next((name for name in _NUM_EXPERTS if config.get(name)), _NUM_EXPERTS[0]))
    return dense + in_experts * _count(config, "num_experts_per_tok") // num_experts


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = _count(config, "num_hidden_layers")
    has_window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    window = _count(config, "sliding_window") if has_window else None
    kind = "sliding_attention" if config["model_type"] in _WINDOW_IN_EVERY_LAYER else "full_attention"
    kinds = config.get("layer_types") or [kind] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _count(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or value < 1:
        raise UnknownArchitecture(f"config.json does not say {name}")
    return value


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of a response on average, and of the longest. source: where that is known from."""

    mean_tokens: float
    longest_tokens: int
    source: str

    def limited_to(self, most: int) -> "ResponseLengths":
        return ResponseLengths(min(self.mean_tokens, most), min(self.longest_tokens, most), self.source)


@dataclass(frozen=True)
class Workload:
    """A comparison by its sizes: the tokens of each prompt, the architecture of each checkpoint by the path that sides
    name, and the dtype in which the run's own weights are stored. by_layer: the stages that hold one layer at a time.
    hidden_on_disk: whether hidden states between two layers are too many for memory there.
    ranks_share_cores: whether the ranks of a model share one processor, so that they take as long as one process would.
    """

    architectures: Mapping[str, Architecture]
    settings: CompareSettings
    prompt_tokens: Sequence[int]
    responses: ResponseLengths
    checkpoint_dtype: Dtype | None = None
    by_layer: frozenset[str] = frozenset()
    hidden_on_disk: bool = False
    ranks_share_cores: bool = True

    @property
    def pass_tokens(self) -> int:
        """Tokens of a forward pass over whole sequences."""
        return self.settings.training.batch_tokens

    @property
    def sequences(self) -> int:
        """Responses of one engine."""
        return len(self.prompt_tokens) * self.samples

    @property
    def samples(self) -> int:
        """Responses of an engine to each prompt."""
        return self.settings.sampling.samples_per_prompt

    @cached_property
    def prompts(self) -> Lengths:
        """Tokens of each prompt."""
        return np.asarray(self.prompt_tokens, dtype=np.float64)

    @property
    def lengths(self) -> Lengths:
        """Tokens of a sequence of each prompt, with its response."""
        return self.prompts + self.responses.mean_tokens

    def architecture_of(self, side: Side) -> Architecture:
        return self.architectures[side.model.path]


def workload_of(
    manifest: Manifest,
    architectures: Mapping[str, Architecture],
    prompt_tokens: Sequence[int],
    responses: ResponseLengths,
) -> Workload:
    """The sizes of a run; its responses are at most as long as its settings allow."""
    checkpoint_dtype = manifest.model.checkpoint_dtype
    return Workload(
        architectures,
        manifest.settings,
        prompt_tokens,
        responses.limited_to(manifest.settings.sampling.max_new_tokens),
        next((dtype for dtype in Dtype if dtype == short_name(checkpoint_dtype)), None),
        ranks_share_cores=not manifest.hardware.get("gpus") or manifest.settings.training.device == "cpu",
    )
