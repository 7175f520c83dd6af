"""The first tokens of each prompt, scored beside the response: they tell a cause by where in the context it sets in.

The first token attends to itself alone. Different weights show there at once, different positions only further on, and
different text before the prompt most of all there.
"""

from collections.abc import Callable, Sequence

from mismatch_probe.records.sequences import ScoredSequence, TokenSequence

START_TOKENS = 64
"""Prompt tokens that are scored, less the first, which nothing predicts."""

Score = Callable[[list[TokenSequence]], list[ScoredSequence]]


def scored_with_starts(score: Score, batch: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """What `score` gives for the batch, each with the log-probs of its prompt's start; raises what `score` raises.

    One pass gives both: a prompt is scored as if its first token alone were the prompt.
    """
    return without_starts(score(with_starts(batch)), batch)


def with_starts(batch: Sequence[TokenSequence]) -> list[TokenSequence]:
    """The sequences as if all of a prompt but its first token were response."""
    return [
        TokenSequence(sequence.id, sequence.prompt_token_ids[:1], [*sequence.prompt_token_ids[1:], *sequence.token_ids])
        for sequence in batch
    ]


def without_starts(whole: Sequence[ScoredSequence], batch: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """Scores of `with_starts(batch)` as those of the batch, each with the log-probs of its prompt's start."""
    return [_apart(scored, sequence) for scored, sequence in zip(whole, batch, strict=True)]


def _apart(scored: ScoredSequence, sequence: TokenSequence) -> ScoredSequence:
    num_predicted = len(sequence.prompt_token_ids) - 1
    return ScoredSequence(
        scored.id,
        scored.logprobs[num_predicted:],
        None if scored.top1_ids is None else scored.top1_ids[num_predicted:],
        None if scored.entropy_nats is None else scored.entropy_nats[num_predicted:],
        scored.logprobs[: min(num_predicted, START_TOKENS - 1)] if num_predicted else None,
    )
