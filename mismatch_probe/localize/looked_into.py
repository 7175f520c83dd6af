"""Which sequences are looked into: as many as their activations fit on the disk that may be used."""

from collections.abc import Sequence
from typing import Any, Final

from mismatch_probe.localize.workspace import Task
from mismatch_probe.records.activations import ActivationBatch, plan_activation_batches
from mismatch_probe.records.sequences import TokenSequence

_BLOCK_NUMBERS: Final = 2
_MODULE_NUMBERS: Final = 48
"""Stored numbers a token, layer and hidden unit; of modules, what a feed-forward part four times as wide gives."""
_BYTES: Final = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MOST_LOGITS: Final = 2**26


def max_stored_tokens(config: dict[str, Any], *, dtypes: tuple[str, str], modules: bool, most_bytes: int) -> int:
    """Tokens whose activations, both sides together, stay within `most_bytes` by the checkpoint's config."""
    text = config.get("text_config", config)
    numbers = text["hidden_size"] * text["num_hidden_layers"] * (_MODULE_NUMBERS if modules else _BLOCK_NUMBERS)
    return int(most_bytes // (numbers * sum(_BYTES[dtype] for dtype in dtypes)))


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


def activation_batches(sequences: Sequence[TokenSequence], task: Task) -> list[ActivationBatch]:
    return plan_activation_batches(
        looked_into(sequences, task.max_stored_tokens),
        batch_tokens=task.settings.training.batch_tokens,
        logit_rows=task.logit_rows,
    )
