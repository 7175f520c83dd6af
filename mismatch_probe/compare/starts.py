"""The first tokens of each prompt, scored beside the response: they tell a cause by where in the context it sets in.

The first token attends to itself alone. Different weights show there at once, different positions only further on, and
different text before the prompt most of all there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mismatch_probe.records.sequences import ScoredSequence, TokenSequence

START_TOKENS = 64
"""Prompt tokens that are scored, less the first, which nothing predicts."""

Score = Callable[[list[TokenSequence]], list[ScoredSequence]]


def scored_with_starts(score: Score, batch: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """What `score` gives for the batch, each with the log-probs of its prompt's start; raises what `score` raises."""
    starts = [
        TokenSequence(sequence.id, sequence.prompt_token_ids[:1], sequence.prompt_token_ids[1:START_TOKENS])
        for sequence in batch
        if len(sequence.prompt_token_ids) > 1
    ]
    of_id = {one.id: one.logprobs for one in score(starts)} if starts else {}
    return [replace(one, start_logprobs=of_id.get(one.id)) for one in score(list(batch))]
