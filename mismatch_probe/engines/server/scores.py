"""A server's answers as scores: a log-prob that is missing stays missing."""

import numpy as np

from mismatch_probe.engines.server.answers import Answer, Candidates
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence


def sampled_scores(sequence_id: str, answer: Answer) -> ScoredSequence:
    """Of the tokens that were sampled; id -1 where no most likely token was named."""
    top1 = [_most_likely(candidates) for candidates in answer.candidates]
    top1 += [-1] * (len(answer.token_ids) - len(top1))
    return ScoredSequence(sequence_id, answer.logprobs, np.asarray(top1, dtype=np.int32))


def prefill_scores(where: str, sequence: TokenSequence, answer: Answer) -> ScoredSequence:
    """Of a response's tokens, from the log-probs of a prompt that holds them; NaN where one is missing.

    Raises:
        EngineError: there are none, of another number of tokens, or of other tokens.
    """
    listed = answer.prompt_candidates
    if listed is None or len(listed) != sequence.num_tokens:
        given = "none" if listed is None else str(len(listed))
        raise EngineError(
            f"the server at {where} gave {given} of {sequence.num_tokens} prompt log-probs for {sequence.id}; leave "
            "prefill out"
        )
    behind = listed[len(sequence.prompt_token_ids) :]
    unnamed = [
        token_id for token_id, entry in zip(sequence.token_ids, behind, strict=True) if entry and token_id not in entry
    ]
    if unnamed:
        raise EngineError(
            f"the server at {where} gave prompt log-probs of other tokens than {sequence.id} has: not of {unnamed[0]}"
        )
    pairs = list(zip(sequence.token_ids, behind, strict=True))
    logprobs = [entry[token_id] if entry else np.nan for token_id, entry in pairs]
    top1 = [_most_likely(entry or {}) for entry in behind]
    return ScoredSequence(sequence.id, np.asarray(logprobs, dtype=np.float32), np.asarray(top1, dtype=np.int32))


def _most_likely(candidates: Candidates) -> int:
    known = {token_id: value for token_id, value in candidates.items() if not np.isnan(value)}
    return max(known, key=lambda token_id: known[token_id]) if known else -1
