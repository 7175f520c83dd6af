"""What of a model's configuration reaches its forward pass, as flat plain values that two sides can be compared by."""

from collections.abc import Mapping
from typing import Any

from mismatch_probe.config.nested import flat

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
        "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "is_decoder",
        "is_encoder_decoder", "label2id", "max_position_embeddings", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type", "return_dict",
        "router_aux_loss_coef", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
        "vocab_size",
    }
)  # fmt: skip
"""Keys of a transformers configuration that change no log-prob, or that an engine pads and rewrites for its own use."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def forward_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the forward pass, nested keys joined by dots; values are plain, unset ones left out."""
    kept = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT and not key.startswith("_")}
    return {name: _plain(value) for name, value in flat(kept) if value is not None and value != {}}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) else str(value)


def has_experts(facts: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts."""
    return any(isinstance(facts.get(name), int) and facts[name] > 1 for name in EXPERT_COUNTS)
