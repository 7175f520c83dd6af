"""Sizes vLLM cannot know: the KV cache of a CPU engine, and how many positions replay may score at once."""

import os
from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.errors import UsageError

_BLOCK_TOKENS: Final = 128
"""Tokens a KV block holds on vLLM's CPU back end."""
_SEQUENCES: Final = 256
"""vLLM's offline default of `max_num_seqs` on a CPU."""
_FREE_MEMORY_SHARE: Final = 0.4
"""Of the free memory; weights, activations and replayed log-probs take the rest."""
_REPLAY_LOGITS_BYTES: Final = 2**30
_BYTES_PER_LOGIT: Final = 12
"""A logit as computed (at most 4 bytes), its FP32 copy or log-prob, and a temporary of the rank count."""
_FEWEST_TOKENS: Final = 256
_MOST_TOKENS: Final = 4096

KV_SIZE_ARGS: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


def memory_defaults(
    config: Any,
    args: Mapping[str, Any],
    *,
    dtype_bytes: int,
    max_model_len: int,
    num_sequences: int | None,
    on_cpu: bool,
) -> dict[str, Any]:
    """Engine arguments that bound memory, for those of them the user left open.

    `config` is what `read_config` returns. A CPU's cache holds `num_sequences` of full length, where that is known, and
    never more than run at once.
    """
    defaults: dict[str, Any] = {}
    if "max_num_batched_tokens" not in args:
        whole_prompt = max_model_len if args.get("enable_chunked_prefill") is False else 0
        tokens = max(replay_tokens(config.vocab_size), args.get("max_num_seqs") or 0, whole_prompt)
        if tokens < _MOST_TOKENS:
            defaults["max_num_batched_tokens"] = tokens
    if on_cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE") and not any(name in args for name in KV_SIZE_ARGS):
        import psutil  # type: ignore[import-untyped]

        size = int(psutil.virtual_memory().available * _FREE_MEMORY_SHARE)
        if isinstance(getattr(config, "num_attention_heads", None), int):
            at_once = args.get("max_num_seqs") or _SEQUENCES
            sequences = at_once if num_sequences is None else min(at_once, num_sequences)
            size = min(size, kv_cache_bytes(config, dtype_bytes, max_model_len=max_model_len, num_sequences=sequences))
        defaults["kv_cache_memory_bytes"] = size // args.get("tensor_parallel_size", 1)
    return defaults


def replay_tokens(vocab_size: int) -> int:
    """Positions a step may hold so that `[positions, vocab_size]` logits and log-probs stay near 1 GiB.

    vLLM's V1 runner scores all prompt positions of a request that one step holds at once, and its memory profile does
    not count them.
    """
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, _REPLAY_LOGITS_BYTES // (_BYTES_PER_LOGIT * vocab_size)))


def kv_cache_bytes(config: Any, dtype_bytes: int, *, max_model_len: int, num_sequences: int) -> int:
    """Keys and values of `num_sequences` full-length sequences in whole blocks, and one block more.

    An upper bound: a layer with a sliding window or a latent cache holds less.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    blocks = num_sequences * -(-max_model_len // _BLOCK_TOKENS) + 1
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * dtype_bytes * blocks * _BLOCK_TOKENS)


def vllm_configs(checkpoint: str, *, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """The checkpoint's config as vLLM reads it, and the part of it that describes the text: the same where it is all.

    Raises:
        UsageError: there is no such checkpoint, or its `config.json` cannot be read.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    try:
        config = get_config(checkpoint, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"the checkpoint {checkpoint!r} cannot be used: {reason.rstrip('.')}; mend --model") from error
    return config, get_hf_text_config(config)
