"""The stages of a comparison: what each computes for a side, which leg it writes, and on which responses.

The first token attends only to itself. Different weights show there at once, different positions only later, and
different text before the prompt shows there most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import numpy as np

from mismatch_probe.config.model import Attention
from mismatch_probe.config.sides import Side
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence


@dataclass(frozen=True)
class _OneLegStage:
    """A stage that writes one leg of a side; `work` and `leaves` are its name and the leg's in the side's spelling."""

    work: ClassVar[str]
    leaves: ClassVar[str] = ""

    side: Side

    @property
    def name(self) -> str:
        return self.side.stage(self.work)

    @property
    def leg(self) -> str:
        return self.side.leg(self.leaves)

    @property
    def model(self) -> Side:
        """The side whose model the training path loads."""
        return self.side

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class SampleStage(_OneLegStage):
    """mu samples responses and reports the log-probs it decoded with."""

    work, leaves = "sample", "decode"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("rollouts", self.leg)


@dataclass(frozen=True)
class ReplayStage(_OneLegStage):
    """mu scores its own responses again by prefill."""

    work, leaves = "replay", "prefill"


EngineChange = Literal["alone", "cached"]


@dataclass(frozen=True)
class EngineFloorStage(_OneLegStage):
    """mu scores a few of its responses by prefill again, each `alone`, or alone with the prefix cache (`cached`)."""

    change: EngineChange

    @property
    def name(self) -> str:
        return self.side.stage("replay", self.change)

    @property
    def leg(self) -> str:
        return self.side.leg(self.change)


@dataclass(frozen=True)
class DecodeAloneStage(_OneLegStage):
    """mu samples the beginnings of a few of its responses again, each alone."""

    leaves = "decoded-alone"

    @property
    def name(self) -> str:
        return self.side.stage("sample", "alone")


@dataclass(frozen=True)
class EngineRoutingStage(_OneLegStage):
    """mu's choice of experts on a few of its responses, by prefill."""

    work = leaves = "routing"


@dataclass(frozen=True)
class DistributionsStage:
    """mu's complete next-token distributions at some positions, in parts that the training path reads."""

    side: Side

    @property
    def name(self) -> str:
        return self.side.stage("distributions")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("distributions",)


@dataclass(frozen=True)
class ScoreStage(_OneLegStage):
    """The training path scores the responses of `samplers`: pi, or the reference on weights as given or rounded."""

    work = "score"

    samplers: tuple[str, ...]


FloorChange = Literal["alone", "again", "other-attention"]


@dataclass(frozen=True)
class FloorStage(_OneLegStage):
    """pi scores a few responses of each sampler one by one: `alone`, the same `again`, or with other attention."""

    samplers: tuple[str, ...]
    change: FloorChange

    @property
    def name(self) -> str:
        return self.side.stage("score", self.change)

    @property
    def leg(self) -> str:
        return self.side.leg(self.change)

    @property
    def model(self) -> Side:
        return self.side if self.attention is None else self.side.with_attention(self.attention)

    @property
    def attention(self) -> Attention | None:
        """The attention of the stage; None for the side's own."""
        assert self.side.training is not None
        return _OTHER_ATTENTION[self.side.training.attention] if self.change == "other-attention" else None


@dataclass(frozen=True)
class RoutingStage(_OneLegStage):
    """pi's choice of experts on the few responses of each engine whose own choice is recorded."""

    work = leaves = "routing"

    engines: tuple[Side, ...]

    @property
    def samplers(self) -> tuple[str, ...]:
        return tuple(mu.sampler for mu in self.engines)


@dataclass(frozen=True)
class FullVocabularyStage(_OneLegStage):
    """pi's complete distributions against mu's, reduced to a few numbers for each position."""

    mu: Side

    @property
    def name(self) -> str:
        return f"compare-{self.leg}"

    @property
    def leg(self) -> str:
        return self.side.full_vocabulary_leg(self.mu)

    @property
    def samplers(self) -> tuple[str, ...]:
        return (self.mu.sampler,)


TrainingStage = ScoreStage | FloorStage | RoutingStage | FullVocabularyStage
LegStage = SampleStage | ReplayStage | EngineFloorStage | DecodeAloneStage | EngineRoutingStage | TrainingStage
Stage = LegStage | DistributionsStage

_OTHER_ATTENTION: Final[dict[Attention | None, Attention]] = {
    None: "eager",
    "sdpa": "eager",
    "eager": "sdpa",
    "flash_attention_2": "sdpa",
}
"""SDPA and eager attention check each other; flash attention, which only runs in 16 bits, is compared with SDPA."""


START_TOKENS = 64
"""The number of prompt tokens that are scored, less the first, which nothing predicts."""

ScoreFunction = Callable[[list[TokenSequence]], list[ScoredSequence]]


def scored_with_starts(score: ScoreFunction, batch: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """The scores of the batch, each with the log-probs of its prompt's start; raises what `score` raises.

    One pass gives both: the prompt is scored as if only its first token were the prompt.
    """
    return without_starts(score(with_starts(batch)), batch)


def with_starts(batch: Sequence[TokenSequence]) -> list[TokenSequence]:
    """The sequences as if all of a prompt but its first token were response."""
    return [
        replace(
            sequence,
            prompt_token_ids=sequence.prompt_token_ids[:1],
            token_ids=[*sequence.prompt_token_ids[1:], *sequence.token_ids],
        )
        for sequence in batch
    ]


def without_starts(scores: Sequence[ScoredSequence], batch: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """Scores of `with_starts(batch)` as those of the batch, each with the log-probs of its prompt's start."""
    return [_split_start(score, sequence) for score, sequence in zip(scores, batch, strict=True)]


def _split_start(score: ScoredSequence, sequence: TokenSequence) -> ScoredSequence:
    num_predicted = len(sequence.prompt_token_ids) - 1
    start = score.logprobs[: min(num_predicted, START_TOKENS - 1)] if num_predicted else None
    return replace(score.without_start(num_predicted), start_logprobs=start)


LONGEST_REPEATED: Final = 4096
"""The most tokens: eager attention has a matrix of tokens by tokens for each head."""
TOO_LONG: Final = f"every response is longer than {LONGEST_REPEATED} tokens with its prompt"

MOST_NUMBERS: Final = 4_000_000
"""The most positions times vocabulary of one sampler, 16 MB in FP32."""

LEAST_CONTEXT_TOKENS: Final = 65_536
"""The tokens of context that the chosen positions may have together, however small the run is."""

DECODED_ALONE: Final = 32
"""The first tokens that are decoded again: 16 responses alone take as many steps as one of 512 tokens."""


def repeated_rows(sequences: Sequence[TokenSequence], most: int) -> list[int]:
    """The rows of at most `most` sequences that are short enough to be scored again, evenly spaced."""
    eligible = [row for row, sequence in enumerate(sequences) if sequence.num_tokens <= LONGEST_REPEATED]
    return [eligible[index] for index in _evenly_spaced(len(eligible), most)]


def compared_positions(sequences: Sequence[TokenSequence], most: int, vocab_size: int) -> list[tuple[int, int]]:
    """The row and response position of at most `most` response tokens, evenly spaced, in order.

    Fewer where positions times `vocab_size` would exceed MOST_NUMBERS, or where their contexts together would hold more
    tokens than the sequences themselves (LEAST_CONTEXT_TOKENS for small runs): at most the work of one more prefill.
    """
    most = min(most, MOST_NUMBERS // vocab_size)
    tokens = _positions_of_tokens(sequences, most)
    context_tokens = sum(len(sequences[row].prompt_token_ids) + position for row, position in tokens)
    limit = max(LEAST_CONTEXT_TOKENS, sum(sequence.num_tokens for sequence in sequences))
    if context_tokens <= limit:
        return tokens
    return _positions_of_tokens(sequences, most * limit // context_tokens)


def _positions_of_tokens(sequences: Sequence[TokenSequence], most: int) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences)])
    tokens = np.asarray(_evenly_spaced(int(starts[-1]), most), dtype=np.int64)
    rows = np.searchsorted(starts, tokens, side="right") - 1
    return list(zip(rows.tolist(), (tokens - starts[rows]).tolist(), strict=True))


def _evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced."""
    if most >= count:
        return list(range(count))
    return [(2 * index + 1) * count // (2 * most) for index in range(most)]
