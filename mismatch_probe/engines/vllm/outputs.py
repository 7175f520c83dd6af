"""vLLM's request outputs as records: ids verified, a log-prob that is missing stays missing."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence
from mismatch_probe.stats.sequences import is_missing

_FINISHED: Final = ("stop", "length")


def sampled_sequence(request: SampleRequest, output: Any, texts: TokenTexts) -> SampledSequence:
    """The response of one decoded request.

    Raises:
        EngineError: the request was aborted, or ran on another prompt than the one given.
    """
    completion = output.outputs[0]
    _same_ids(request.id, request.prompt.token_ids, output.prompt_token_ids)
    if completion.finish_reason not in _FINISHED:
        raise EngineError(
            f"vLLM ended the response {request.id} with {completion.finish_reason!r} instead of finishing it"
        )
    token_ids = list(completion.token_ids)
    return SampledSequence(
        sequence=TokenSequence(request.id, list(request.prompt.token_ids), token_ids),
        scores=scores(request.id, token_ids, completion.logprobs, first=0),
        finish_reason=completion.finish_reason,
        token_texts=texts(token_ids),
    )


def replayed_scores(sequence: TokenSequence, output: Any) -> ScoredSequence:
    """The prefill log-probs of one replayed request's response part.

    Raises:
        EngineError: vLLM scored other ids than those given.
    """
    _same_ids(sequence.id, [*sequence.prompt_token_ids, *sequence.token_ids], output.prompt_token_ids)
    first = len(sequence.prompt_token_ids)
    return scores(sequence.id, sequence.token_ids, output.prompt_logprobs, first=first)


def scores(sequence_id: str, token_ids: list[int], flat: Any, *, first: int) -> ScoredSequence:
    """Log-probs and arg-max ids of `token_ids` out of a `FlatLogprobs` whose position `first` is the first token's.

    Each position holds the token asked for, then the most probable one where that is another. A position that is absent
    gives NaN and id -1, a log-prob that vLLM calls missing NaN.

    Raises:
        EngineError: a position holds another token than the one asked for.
    """
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    top1_ids = np.full(len(token_ids), -1, dtype=np.int32)
    num_positions = 0 if flat is None else len(flat.start_indices)
    for index, token_id in enumerate(token_ids[: max(0, num_positions - first)]):
        start, end = flat.start_indices[first + index], flat.end_indices[first + index]
        if start == end:
            continue
        if flat.token_ids[start] != token_id:
            raise EngineError(
                f"vLLM returned the log-prob of token {flat.token_ids[start]} where {sequence_id} has {token_id} "
                f"(response position {index})"
            )
        logprobs[index], top1_ids[index] = flat.logprobs[start], flat.token_ids[min(start + 1, end - 1)]
    logprobs[is_missing(logprobs)] = np.nan
    return ScoredSequence(sequence_id, logprobs, top1_ids)


def whole_distributions(outputs: Sequence[Any], vocab_size: int) -> FloatArray:
    """Log-probs of the first decoded position of each request by token id [P, V]; NaN for ids that are absent."""
    rows = np.full((len(outputs), vocab_size), np.nan, dtype=np.float32)
    for row, output in zip(rows, outputs, strict=True):
        flat = output.outputs[0].logprobs
        if flat is not None and flat.start_indices:
            first = slice(flat.start_indices[0], flat.end_indices[0])
            row[flat.token_ids[first]] = flat.logprobs[first]
    return rows


def num_missing(scored: Sequence[ScoredSequence]) -> int:
    """Tokens without a log-prob."""
    return sum(int(np.isnan(sequence.logprobs).sum()) for sequence in scored)


def _same_ids(sequence_id: str, asked: Sequence[int], used: Sequence[int] | None) -> None:
    if used is None or list(asked) != list(used):
        raise EngineError(f"vLLM ran {sequence_id} on other token ids than those given")
