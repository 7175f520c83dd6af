"""Which few responses and positions are measured more closely: evenly spread, and a function of the records alone."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from mismatch_probe.records.sequences import TokenSequence

LONGEST_REPEATED: Final = 4096
"""Tokens: eager attention holds a matrix of tokens by tokens for each head."""
TOO_LONG: Final = f"every response is longer than {LONGEST_REPEATED} tokens with its prompt"

MOST_NUMBERS: Final = 4_000_000
"""Positions times vocabulary of one sampler, 16 MB in FP32."""

LEAST_CONTEXT_TOKENS: Final = 65_536
"""Tokens of context that the chosen positions may have together, however small the run."""

DECODED_ALONE: Final = 32
"""First tokens of a response that are decoded again: 16 responses alone take as many steps as one of 512 tokens."""


def repeated_rows(sequences: Sequence[TokenSequence], most: int) -> list[int]:
    """Rows of at most `most` sequences that are short enough to be scored once more, evenly spread."""
    eligible = [row for row, sequence in enumerate(sequences) if sequence.num_tokens <= LONGEST_REPEATED]
    return [eligible[index] for index in _spread(len(eligible), most)]


def compared_positions(sequences: Sequence[TokenSequence], most: int, vocab_size: int) -> list[tuple[int, int]]:
    """Row and response position of at most `most` response tokens, evenly spread, in order.

    Fewer where positions times `vocab_size` would exceed MOST_NUMBERS, or where their contexts together would hold more
    tokens than the sequences themselves (LEAST_CONTEXT_TOKENS for small runs): at most the work of one more prefill.
    """
    most = min(most, MOST_NUMBERS // vocab_size)
    chosen = _positions(sequences, most)
    context_tokens = sum(len(sequences[row].prompt_token_ids) + position for row, position in chosen)
    allowed = max(LEAST_CONTEXT_TOKENS, sum(sequence.num_tokens for sequence in sequences))
    if context_tokens <= allowed:
        return chosen
    return _positions(sequences, most * allowed // context_tokens)


def _positions(sequences: Sequence[TokenSequence], most: int) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences)])
    tokens = np.asarray(_spread(int(starts[-1]), most), dtype=np.int64)
    rows = np.searchsorted(starts, tokens, side="right") - 1
    return list(zip(rows.tolist(), (tokens - starts[rows]).tolist(), strict=True))


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    if most >= count:
        return list(range(count))
    return [(2 * index + 1) * count // (2 * most) for index in range(most)]
