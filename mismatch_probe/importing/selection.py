"""Which responses of a log the statistics are computed from: all, or whole clusters of prompts chosen at random."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Choice:
    """The prompts, and the share of their responses: below 1 where those to a single one are too many."""

    prompt_ids: frozenset[str]
    share: float = 1.0

    def takes(self, where: str) -> bool:
        """Whether a response to one of the prompts is chosen, by where it was read from."""
        return self.share >= 1 or _number(where) < self.share


def chosen_prompts(tokens_of: Mapping[str, int], cluster_of: Callable[[str], str], most_tokens: int) -> Choice:
    """Prompts whose responses together have at most `most_tokens` sampled tokens, or about as many of one cluster.

    tokens_of: by prompt. The choice depends on names alone, so it is the same each time, and it knows nothing of the
    numbers. Whole clusters are chosen because their responses are not independent.
    """
    clusters: dict[str, int] = defaultdict(int)
    for prompt_id, num_tokens in tokens_of.items():
        clusters[cluster_of(prompt_id)] += num_tokens
    chosen: set[str] = set()
    left = most_tokens
    for cluster in sorted(clusters, key=_number):
        if chosen and clusters[cluster] > left:
            break
        chosen.add(cluster)
        left -= clusters[cluster]
    prompt_ids = frozenset(prompt_id for prompt_id in tokens_of if cluster_of(prompt_id) in chosen)
    return Choice(prompt_ids, 1.0 if left >= 0 else most_tokens / (most_tokens - left))


def _number(name: str) -> float:
    """From 0 to 1, by chance of the name."""
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest) / 2.0 ** (8 * _DIGEST_BYTES)
