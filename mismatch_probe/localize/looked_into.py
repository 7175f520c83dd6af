"""Which sequences are looked into: as many as their activations fit on the disk that may be used."""

from collections.abc import Sequence
from typing import Any, Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.workspace import JobInput
from mismatch_probe.records.activations import ActivationBatch, plan_activation_batches
from mismatch_probe.records.sequences import TokenSequence

_BLOCK_NUMBERS: Final = 2
"""Stored numbers a token, layer and hidden unit."""
_HIDDEN_WIDE: Final = 18
_HEADS_WIDE: Final = 6
_FEED_FORWARD_WIDE: Final = 6
"""Of modules: how often a layer of vLLM, whose norms are given FP32 sums, stores what is as wide as this."""
_MOST_LOGITS: Final = 2**26


def max_stored_tokens(config: dict[str, Any], *, dtypes: tuple[Dtype, Dtype], modules: bool, most_bytes: int) -> int:
    """Tokens whose activations, both sides together, stay within `most_bytes` by the checkpoint's config."""
    text = config.get("text_config", config)
    numbers = _of_modules(text) if modules else _BLOCK_NUMBERS * text["hidden_size"]
    return int(most_bytes // (numbers * text["num_hidden_layers"] * sum(dtype.num_bytes for dtype in dtypes)))


def _of_modules(text: dict[str, Any]) -> int:
    """Stored numbers a token and layer; where the config does not say, heads are as wide as the stream in all."""
    hidden: int = text["hidden_size"]
    heads: int = text.get("num_attention_heads") or 1
    head_dim: int = text.get("head_dim") or hidden // heads
    num_heads = heads + (text.get("num_key_value_heads") or heads)
    feed_forward: int = text.get("intermediate_size") or 4 * hidden
    return _HIDDEN_WIDE * hidden + _HEADS_WIDE * num_heads * head_dim + _FEED_FORWARD_WIDE * feed_forward


def logit_rows(config: dict[str, Any]) -> int:
    """Positions at which all logits are held against each other: a vocabulary is wide."""
    return int(max(1, _MOST_LOGITS // config.get("text_config", config)["vocab_size"]))


def looked_into(sequences: Sequence[TokenSequence], max_tokens: int) -> list[TokenSequence]:
    """The first sequences that fit, one at least."""
    chosen: list[TokenSequence] = []
    room = max_tokens
    for sequence in sequences:
        if chosen and sequence.num_tokens > room:
            break
        chosen.append(sequence)
        room -= sequence.num_tokens
    return chosen


def activation_batches(sequences: Sequence[TokenSequence], task: JobInput) -> list[ActivationBatch]:
    return plan_activation_batches(
        looked_into(sequences, task.max_stored_tokens),
        batch_tokens=task.settings.training.batch_tokens,
        logit_rows=task.logit_rows,
    )
