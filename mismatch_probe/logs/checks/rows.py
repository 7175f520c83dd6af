"""What the rows of a log look like: masks, ids, copies. Sums that can be added up."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import is_usable, of_sampled_tokens

_UNLIKELY_NATS: Final = 20.0
_UNLIKELY_TOKENS: Final = 64
_RUN_OF_PADDING: Final = 8


@dataclass
class RowSums:
    """Counts over responses. unlikely: hashes of those too improbable to be sampled twice, 8 bytes each."""

    responses: int = 0
    without_sampled: int = 0
    sampled: int = 0
    not_sampled: int = 0
    padding: int = 0
    largest_id: int = -1
    largest_id_at: str = ""
    with_padding_inside: int = 0
    padding_inside_at: str = ""
    unlikely: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, response: LoggedResponse) -> None:
        num_sampled = int(response.sampled.sum())
        self.responses += 1
        self.without_sampled += not num_sampled
        self.sampled += num_sampled
        self.not_sampled += response.token_ids.size - num_sampled
        self.padding += response.num_padding
        for ids in (response.prompt_token_ids, response.token_ids):
            if ids.size and ids.max() > self.largest_id:
                self.largest_id, self.largest_id_at = int(ids.max()), response.where
        if _ends_in_padding(response):
            self.with_padding_inside += 1
            self.padding_inside_at = self.padding_inside_at or response.where
        if _is_unlikely(response):
            digest = hashlib.blake2b(response.prompt_token_ids.tobytes() + b"|", digest_size=8)
            digest.update(response.token_ids.tobytes())
            self.unlikely.append(int.from_bytes(digest.digest(), "little"))

    def __iadd__(self, other: Self) -> Self:
        if other.largest_id > self.largest_id:
            self.largest_id, self.largest_id_at = other.largest_id, other.largest_id_at
        self.responses += other.responses
        self.without_sampled += other.without_sampled
        self.sampled += other.sampled
        self.not_sampled += other.not_sampled
        self.padding += other.padding
        self.with_padding_inside += other.with_padding_inside
        self.padding_inside_at = self.padding_inside_at or other.padding_inside_at
        self.unlikely = self.unlikely + other.unlikely
        return self

    @property
    def copies(self) -> int:
        """Responses that repeat the ids of another one that was too improbable to be sampled twice."""
        return len(self.unlikely) - np.unique(np.frombuffer(self.unlikely, np.uint64)).size if self.unlikely else 0


def _is_unlikely(response: LoggedResponse) -> bool:
    """By the sampler's log-probs, or by the length where there are none."""
    mu = None if response.log_mu is None else of_sampled_tokens(response.log_mu)
    counted = mu[response.sampled & is_usable(mu)] if mu is not None else np.zeros(0)
    if not counted.any():
        return int(response.sampled.sum()) >= _UNLIKELY_TOKENS
    return float(counted.sum()) < -_UNLIKELY_NATS


def _ends_in_padding(response: LoggedResponse) -> bool:
    """Whether it starts or ends with sampled tokens of one id without a log-prob."""
    mu = response.log_mu
    if mu is None or mu.size <= _RUN_OF_PADDING:
        return False
    for end in (slice(None, _RUN_OF_PADDING), slice(-_RUN_OF_PADDING, None)):
        ids, values = response.token_ids[end], mu[end]
        if response.sampled[end].all() and (ids == ids[0]).all() and (np.isnan(values) | (values == 0)).all():
            return bool(mu[response.sampled].any())
    return False
