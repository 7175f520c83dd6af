"""Activations inside a model by their places, and the sums of errors at every place.

A tensor is stored under `PLACE.END`: `self_attn.q_proj.out`, `input_layernorm.in0`, and the residual stream behind a
layer as `block.out`. Its rows are the batch's tokens, one sequence after another, each without its last token, which no
pass computes for its own sake.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

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


def stored_keys(place: str, names: Container[str]) -> tuple[list[str], str]:
    """Under which keys a place's inputs and its output are stored; some are another place's, and stored once."""
    if place in (ROTARY_QUERIES, ROTARY_KEYS):
        end, letter = ("in0", "q") if place == ROTARY_QUERIES else ("in1", "k")
        norm_key = key(f"self_attn.{letter}_norm", "out")
        input_key = norm_key if norm_key in names else key(f"self_attn.{letter}_proj", "out")
        return [input_key], key(ATTENTION, end)
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
    activation_batches, num_tokens, first_sequence = [], 0, 0
    for number, batch in enumerate(batches):
        rows, start = [], 0
        for sequence in batch:
            answer = start + len(sequence.prompt_token_ids) - 1
            rows += [answer + i for i in range(len(sequence.token_ids)) if (num_tokens + i) % stride == 0]
            num_tokens += len(sequence.token_ids)
            start += sequence.num_tokens - 1
        activation_batches.append(ActivationBatch(number, first_sequence, batch, rows))
        first_sequence += len(batch)
    return activation_batches


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ErrorSums:
    """Sums over the tokens of each sequence [N] of what a side computed against a target, relative token by token.

    A token's squares are over the square of its target's length, so that each token counts alike.
    """

    tokens: Floats
    target_squares: Floats
    """1 for each token whose target is not zero."""
    side_squares: Floats
    error_squares: Floats
    along: Floats
    """The error along the target."""
    largest: Floats
    """Of all errors, in units of the token's root mean square."""


@dataclass(frozen=True)
class OwnSums:
    """Sums of own errors, each in units of its number's size; by channel [C] and by sequence [N].

    `squares` and `fourths` are powers of the errors: their ratio shows how many tokens decide a channel.
    `along` over `targets` is how much longer the output is than FP32 makes it.
    """

    tokens: Floats
    squares: Floats
    fourths: Floats
    unfaithful: Floats
    """`squares` of those numbers alone that are neither of the two neighbours of FP32's in the side's format: rounded
    to nearest or chopped, a right number is one of them.
    """
    nearest: Floats
    """What `squares` would be, were FP32's numbers rounded to nearest in the coarser of the two sides' formats."""
    along: Floats
    targets: Floats
    sequence_along: Floats
    sequence_targets: Floats
    token_moments: Floats
    """[3]: sums over tokens of the squares and products of a token's `along` and `targets`."""
    extra_along: Floats = field(default_factory=lambda: np.zeros(1))
    """[1]: what `along` changes by where a norm rounds its numbers before it multiplies them by its weights, too."""
    extra_squares: Floats = field(default_factory=lambda: np.zeros(1))
    """What `squares` would be there [C], of rounding to nearest; [1], 0 in older records."""


@dataclass(frozen=True)
class SideSums:
    """Against the reference, against FP32 on the side's own input, and of the latter number by number."""

    total: ErrorSums
    own: ErrorSums
    own_by_number: OwnSums
    between_parts: OwnSums
    """`own_by_number` without what comes of the own errors of the places inside; the same where there are none."""


@dataclass(frozen=True)
class PlaceSums:
    layer: int | None
    place: str
    infer: SideSums
    train: SideSums
    between: ErrorSums


@dataclass(frozen=True)
class RouterSums:
    """Tokens [N], and those whose experts differ: of each side from FP32, of the sides from each other."""

    layer: int
    tokens: Floats
    infer: Floats
    train: Floats
    sides: Floats
