"""Which responses of a log the statistics are computed from: all, or whole prompts chosen at random."""

import hashlib
from collections.abc import Mapping


def chosen_prompts(tokens_of: Mapping[str, int], most_tokens: int) -> set[str]:
    """Prompts whose responses together have at most `most_tokens` sampled tokens, at least one prompt.

    The choice depends on the prompts' names alone, so it is the same each time, and it knows nothing of the numbers.
    Whole prompts are chosen because the responses to one are not independent.
    """
    chosen: set[str] = set()
    left = most_tokens
    for prompt_id in sorted(tokens_of, key=_priority):
        if chosen and tokens_of[prompt_id] > left:
            break
        chosen.add(prompt_id)
        left -= tokens_of[prompt_id]
    return chosen


def _priority(prompt_id: str) -> bytes:
    return hashlib.blake2b(prompt_id.encode(), digest_size=8).digest()
