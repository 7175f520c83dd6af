"""Where activations lie between the passes: a folder for each side and batch, a file for each layer.

A tensor is stored under `PLACE.END`: `self_attn.q_proj.out`, `input_layernorm.in0`, and the residual stream behind a
layer as `block.out`. Its rows are the batch's tokens, one sequence after another, each without its last token, which no
pass computes for its own sake.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mismatch_probe.records.sequences import TokenSequence

BLOCK: Final = "block"
ATTENTION: Final = "self_attn.attention"
"""The product of queries, keys and values, which has no module of its own in transformers."""
ROTARY_QUERIES: Final = "self_attn.rotary_emb[q]"
ROTARY_KEYS: Final = "self_attn.rotary_emb[k]"
ACTIVATION: Final = "mlp.act_fn"
"""The activation of the gate times the up projection."""
EMBEDDING: Final = "embed_tokens"
NORM: Final = "norm"
HEAD: Final = "lm_head"
INFER: Final = "infer"
TRAIN: Final = "train"
_LAYER: Final = re.compile(r"layer \d+")
_ROUTERS: Final = ("gate", "router")


@dataclass(frozen=True)
class ActivationBatch:
    """Sequences that share a pass, the number of the first among all, and the rows whose logits are kept."""

    number: int
    first_sequence: int
    sequences: list[TokenSequence]
    logit_rows: list[int]

    @property
    def rows_per_sequence(self) -> list[int]:
        return [sequence.num_tokens - 1 for sequence in self.sequences]


@dataclass(frozen=True)
class ActivationStore:
    root: Path

    def file(self, side: str, batch: int, layer: int | None) -> Path:
        """Tensors of one layer; None for what lies outside the layers."""
        name = "outside" if layer is None else f"layer-{layer:03d}"
        return self.root / side / f"batch-{batch:03d}" / f"{name}.safetensors"

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*.safetensors"))


def key(place: str, end: str) -> str:
    return f"{place}.{end}"


def is_router(place: str) -> bool:
    """Whether a module of this name, inside a layer, gives the logits by which a token's experts are chosen."""
    return place.rpartition(".")[2] in _ROUTERS


def is_layer(part: str) -> bool:
    """Whether a part that is raised is a whole layer."""
    return _LAYER.fullmatch(part) is not None


def stored_keys(place: str, stored: Container[str]) -> tuple[list[str], str]:
    """Under which keys a place's inputs and its output are stored; some are another place's, and stored once."""
    if place in (ROTARY_QUERIES, ROTARY_KEYS):
        end, letter = ("in0", "q") if place == ROTARY_QUERIES else ("in1", "k")
        normed = key(f"self_attn.{letter}_norm", "out")
        given = normed if normed in stored else key(f"self_attn.{letter}_proj", "out")
        return [given], key(ATTENTION, end)
    if place == ACTIVATION:
        return [key("mlp.gate_proj", "out"), key("mlp.up_proj", "out")], key("mlp.down_proj", "in0")
    if place == ATTENTION:
        return [key(place, f"in{number}") for number in range(3)], key(place, "out")
    return [key(place, "in0")], key(place, "out")


def plan_activation_batches(
    sequences: Sequence[TokenSequence], *, batch_tokens: int, logit_rows: int
) -> list[ActivationBatch]:
    """Sequences in order, as many a batch as fit `batch_tokens`, and at most `logit_rows` positions of responses."""
    batches: list[list[TokenSequence]] = []
    room = 0
    for sequence in sequences:
        if not batches or sequence.num_tokens > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(sequence)
        room -= sequence.num_tokens
    total = sum(len(sequence.token_ids) for sequence in sequences)
    stride = max(1, -(-total // max(logit_rows, 1)))
    planned, seen, first_sequence = [], 0, 0
    for number, batch in enumerate(batches):
        rows, start = [], 0
        for sequence in batch:
            answer = start + len(sequence.prompt_token_ids) - 1
            rows += [answer + i for i in range(len(sequence.token_ids)) if (seen + i) % stride == 0]
            seen += len(sequence.token_ids)
            start += sequence.num_tokens - 1
        planned.append(ActivationBatch(number, first_sequence, batch, rows))
        first_sequence += len(batch)
    return planned
