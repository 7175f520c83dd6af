"""What passes between stages and to the statistics: prompts, requests, and sampled, scored or logged sequences."""

from dataclasses import dataclass, field, fields, replace
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


@dataclass(frozen=True)
class KeptSets:
    """The ids that an engine could have drawn at each of T tokens; an empty set stands for the whole vocabulary."""

    ids: IntArray
    """Of all sets, one behind another [M]."""
    ends: npt.NDArray[np.int64]
    """Where each set ends in `ids` [T]."""
    logprobs: FloatArray | None = None
    """The engine's, of `ids` [M], in nats; None where they are not recorded."""

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
    """[T] the policy sampled the token, no tool or template wrote it. log_mu is the engine's, log_pi the trainer's,
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
    """Experts that the engine's routers took [S, L, K], of S tokens from the prompt's or the response's first on."""
    kept: KeptSets | None = None
    """What the engine could have drawn at each token of the response."""


_MOST_DIGITS: Final = 18
"""The most digits of a weight version that counts as a number; a longer one is a text."""


def weights_order(version: str | None) -> tuple[int, str]:
    """What sorts versions of weights from the oldest to the newest: numbers as numbers, others as texts."""
    is_number = version is not None and version.isdecimal() and len(version) <= _MOST_DIGITS
    return (int(version or 0) if is_number else 0, version or "")
