"""What passes between stages and to the statistics: sequences, activations, sums of errors at every place.

A tensor is stored under `PLACE.END`: `self_attn.q_proj.out`, `input_layernorm.in0`, and the residual stream behind a
layer as `block.out`. Its rows are the batch's tokens, one sequence after another, each without its last token, which no
pass computes for its own sake.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt, and what the processor of the run's checkpoint made of them."""

    folder: str
    """Of the checkpoint."""
    paths: list[str]
    digests: list[str]
    """SHA-256 of each file."""
    pixels: str
    """SHA-256 of the pixel values of all images in FP32, in their order."""
    num_tokens: int
    """Placeholders in the prompt."""
    num_prompt: int
    """Tokens of the whole prompt."""
    text: str
    """What the processor was given: the template's text, with one marker an image."""
    engine_token_ids: list[int]
    """Of that text, before any marker became placeholders."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt whose ids are fixed once and are the same on every leg."""

    prompt_id: str
    token_ids: list[int]
    text: str
    answer: str | None = None
    images: PromptImages | None = None
    where: str | None = field(default=None, compare=False)
    """It was read from, `line 3 of FILE`."""

    @property
    def label(self) -> str:
        """How a sentence names it."""
        return prompt_label(self.prompt_id, self.where)


def prompt_label(prompt_id: str, where: str | None) -> str:
    """`prompt row-2 (line 3 of FILE)`."""
    return f"prompt {prompt_id}" + (f" ({where})" if where else "")


@dataclass(frozen=True)
class SampleRequest:
    id: str
    prompt: EncodedPrompt
    seed: int


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and a response as ids; log-probs are always those of `token_ids`, never of the prompt."""

    id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    images: PromptImages | None = field(default=None, compare=False)
    """Of the prompt, however many of its tokens count as response."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(frozen=True)
class LegColumn:
    """A column that a leg's file may lack: what its lists hold, and where statistics find them."""

    number: type[np.number] | None = None
    """The type of its numbers; None for that of the leg's log-probs."""
    pair: str = ""
    """Each field of `TokenPair` of this name with `_pi` or `_mu` behind it is filled from that side's leg."""
    per_token: bool = True
    """Whether it has a value for each token of the response."""


_COLUMN: Final = "leg column"


@dataclass(frozen=True)
class ScoredSequence:
    """Log-probs (nats, shape [T]) of one response's tokens under one policy.

    NaN marks a log-prob the engine did not deliver: it is counted and named later, never averaged. A field that may be
    None is a column of the leg's file, and is written, read and brought to the pair as its `LegColumn` says.
    """

    id: str
    logprobs: FloatArray
    top1_ids: IntArray | None = field(default=None, metadata={_COLUMN: LegColumn(np.int32, pair="top1")})
    """[T] The arg-max token before each position."""
    entropy_nats: FloatArray | None = field(default=None, metadata={_COLUMN: LegColumn(np.float32, pair="entropy")})
    """[T] The entropy of the next-token distribution."""
    start_logprobs: FloatArray | None = field(default=None, metadata={_COLUMN: LegColumn(per_token=False)})
    """Those of the prompt's second and following tokens, where the start of the context is seen."""

    def without_start(self, num_tokens: int) -> Self:
        """The same scores without those of the first tokens: every field that has a value a token is sliced."""
        names = ["logprobs", *(name for name, column in leg_columns(type(self)).items() if column.per_token)]
        columns = {name: getattr(self, name) for name in names}
        remaining_columns = {name: values[num_tokens:] for name, values in columns.items() if values is not None}
        return replace(self, **remaining_columns)


def leg_columns(scores: type[ScoredSequence] = ScoredSequence) -> dict[str, LegColumn]:
    """The columns besides id and log-probs, by the names of the fields, in their order."""
    return {
        column.name: column.metadata.get(_COLUMN, LegColumn())
        for column in fields(scores)
        if column.name not in ("id", "logprobs")
    }


@dataclass(frozen=True)
class SampledSequence:
    """One response sampled from mu with the log-probs the engine returned while decoding."""

    sequence: TokenSequence
    scores: ScoredSequence
    finish_reason: str
    token_texts: list[str]


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


@dataclass(frozen=True)
class KeptSets:
    """The ids that a sampler could have drawn at each of T tokens; an empty set stands for the whole vocabulary."""

    ids: IntArray
    """Of all sets, one behind another [M]."""
    ends: npt.NDArray[np.int64]
    """Where each set ends in `ids` [T]."""
    logprobs: FloatArray | None = None
    """The sampler's, of `ids` [M], in nats; None where they are not recorded."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Of each set [T]."""
        return np.diff(self.ends, prepend=0)

    def singles(self) -> "KeptSets":
        """Without the sets of several ids, whose tokens then have none."""
        is_single = self.sizes == 1
        return KeptSets(self.ids[self.ends[is_single] - 1], np.cumsum(is_single))

    def of(self, tokens: slice) -> "KeptSets":
        """The sets of some tokens in a row, without log-probs."""
        start = int(self.ends[tokens.start - 1]) if tokens.start else 0
        ends = self.ends[tokens]
        return KeptSets(self.ids[start : int(ends[-1]) if ends.size else start], ends - start)


@dataclass(frozen=True, kw_only=True)
class LoggedResponse:
    """One response as it was logged. Arrays [T] run over the response's tokens; log-probs are in nats."""

    where: str
    """It was read from, `line 3 of FILE`."""
    prompt_token_ids: IntArray
    token_ids: IntArray
    sampled: npt.NDArray[np.bool_]
    """[T] the policy sampled the token, no tool or template wrote it. log_mu is the sampler's, log_pi the trainer's,
    log_ref a reference policy's: None where the log has no such column, NaN where it has no number for a token."""
    log_mu: FloatArray | None = None
    log_pi: FloatArray | None = None
    log_ref: FloatArray | None = None
    entropy_nats: FloatArray | None = None
    step: int | None = None
    """Of training."""
    weight_version: str | None = None
    """Of the weights that sampled it; `FIRST-LAST` of several."""
    weight_spans: tuple[tuple[str, int], ...] | None = None
    """Versions of its parts, and the token that each ends before; None where they are not recorded."""
    temperature: float | None = None
    group: str | None = None
    """What the responses to one prompt have in common, None where the log does not say."""
    trajectory: str | None = None
    """What the turns of one conversation have in common; they stand in the log in their order."""
    finish_reason: str | None = None
    model: str | None = None
    """Its name, where the log has one besides the version of its weights."""
    num_padding: int = 0
    """Tokens of padding that the log has around it, and that are left out here."""
    experts: IntArray | None = None
    """Experts that the sampler's routers took [S, L, K], of S tokens from the prompt's or the response's first on."""
    kept: KeptSets | None = None
    """What the sampler could have drawn at each token of the response."""


_MOST_DIGITS: Final = 18
"""The most digits of a weight version that counts as a number; a longer one is a text."""


def weights_order(version: str | None) -> tuple[int, str]:
    """What sorts versions of weights from the oldest to the newest: numbers as numbers, others as texts."""
    is_number = version is not None and version.isdecimal() and len(version) <= _MOST_DIGITS
    return (int(version or 0) if is_number else 0, version or "")


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
