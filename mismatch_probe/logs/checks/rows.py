"""What the rows of a log look like: masks, ids, copied columns. Sums that can be added up."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.logs.checks.columns import ResponseBlock
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.stats.copies import CopiedRows, CopyTotals, ShortCopyTotals, are_alike, row_totals
from mismatch_probe.stats.sequences import Mask, is_usable

_UNLIKELY_NATS: Final = 20.0
_UNLIKELY_TOKENS: Final = 64
_RUN_OF_PADDING: Final = 8


@dataclass
class RowSums:
    """Counts over responses."""

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
    """Hashes of those too improbable to be sampled twice, 8 bytes each."""

    def add(self, block: ResponseBlock) -> None:
        responses, num_sampled = block.responses, block.num_sampled
        self.responses += len(responses)
        self.without_sampled += int((num_sampled == 0).sum())
        self.sampled += int(num_sampled.sum())
        self.not_sampled += int((block.lengths - num_sampled).sum())
        self.padding += sum(response.num_padding for response in responses)
        self._look_for_largest_id(block)
        for row in np.flatnonzero(_end_in_padding(block)):
            self.with_padding_inside += 1
            self.padding_inside_at = self.padding_inside_at or responses[row].where
        for row in np.flatnonzero(_are_unlikely(block)):
            response = responses[row]
            digest = hashlib.blake2b(response.prompt_token_ids.tobytes() + b"|", digest_size=8)
            digest.update(response.token_ids.tobytes())
            self.unlikely.append(int.from_bytes(digest.digest(), "little"))

    def _look_for_largest_id(self, block: ResponseBlock) -> None:
        """The largest id, and the first response that has it."""
        prompts = [response.prompt_token_ids for response in block.responses]
        rows_of_prompts = np.repeat(np.arange(len(prompts)), [ids.size for ids in prompts])
        places = ((np.concatenate(prompts), rows_of_prompts), (block.token_ids, block.rows))
        largest = max(int(ids.max(initial=-1)) for ids, _ in places)
        if largest > self.largest_id:
            first = min(int(rows[ids.argmax()]) for ids, rows in places if ids.size and ids.max() == largest)
            self.largest_id, self.largest_id_at = largest, block.responses[first].where

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


def _are_unlikely(block: ResponseBlock) -> Mask:
    """Responses [N] by the sampler's log-probs, or by the length where there are none."""
    mu = block.log_mu[block.sampled]
    has_logprob = is_usable(mu)
    surprisal = np.bincount(
        block.rows_of_sampled[has_logprob], weights=-mu[has_logprob], minlength=len(block.responses)
    )
    has_mu = block.count(has_logprob & (mu != 0)) > 0
    return np.where(has_mu, surprisal > _UNLIKELY_NATS, block.num_sampled >= _UNLIKELY_TOKENS)


def _end_in_padding(block: ResponseBlock) -> Mask:
    """Responses [N] that start or end with sampled tokens of one id without a log-prob, and have others."""
    mu, lengths = block.column("log_mu"), block.lengths
    long = np.flatnonzero(block.has("log_mu") & (lengths > _RUN_OF_PADDING))
    ends = np.cumsum(lengths)[long]
    end_in_padding = np.zeros(lengths.size, dtype=np.bool_)
    for first in (ends - lengths[long], ends - _RUN_OF_PADDING):
        of_run = first[:, None] + np.arange(_RUN_OF_PADDING)
        ids, values = block.token_ids[of_run], mu[of_run]
        is_run = block.sampled[of_run] & (ids == ids[:, :1]) & (np.isnan(values) | (values == 0))
        end_in_padding[long] |= is_run.all(axis=1)
    sampled_mu = block.of_sampled("log_mu")
    return end_in_padding & (block.count(sampled_mu != 0) > 0)


COPIED_COLUMNS: Final = ("log_pi", "log_ref")


@dataclass
class Copies:
    """Of a column against the sampler's: how many telling tokens each response that may be a copy has, and how many of
    them are equal, 4 bytes each; and the totals of the other responses, of these without each one's first token, where
    something else may stand in a copy, and of all; and those of the short ones.
    """

    telling: "array[int]" = field(default_factory=lambda: array("I"))
    equal: "array[int]" = field(default_factory=lambda: array("I"))
    others: CopyTotals = field(default_factory=CopyTotals)
    others_after_first: CopyTotals = field(default_factory=CopyTotals)
    of_all: CopyTotals = field(default_factory=CopyTotals)
    short: ShortCopyTotals = field(default_factory=ShortCopyTotals)

    def add(self, column: str, block: ResponseBlock) -> None:
        """Count the responses of a block that have both columns, by their sampled tokens."""
        if not (block.has(column) & block.has("log_mu")).any():
            return
        columns, rows = (block.of_sampled(column), block.of_sampled("log_mu")), block.rows_of_sampled
        of_rows = row_totals(*columns, rows, len(block.responses))
        totals = of_rows.of_all
        may_be_copies = are_alike(totals)
        telling, equal, _ = totals[may_be_copies].T.astype(np.int64)
        self.telling.extend(telling.tolist())
        self.equal.extend(equal.tolist())
        self.others += CopyTotals(*totals[~may_be_copies].sum(axis=0).tolist())
        self.of_all += CopyTotals(*totals.sum(axis=0).tolist())
        self.short += ShortCopyTotals.of(of_rows)
        after_first = np.concatenate([[False], rows[1:] == rows[:-1]]) & ~may_be_copies[rows]
        first, second = columns
        self.others_after_first += CopyTotals.of(first[after_first], second[after_first])

    def __iadd__(self, other: Self) -> Self:
        self.telling.extend(other.telling)
        self.equal.extend(other.equal)
        self.others += other.others
        self.others_after_first += other.others_after_first
        self.of_all += other.of_all
        self.short += other.short
        return self

    @property
    def are_all(self) -> bool:
        """Whether the column is a copy throughout, and not only in some responses among others that were computed."""
        return self.of_all.is_copy and not self.others_after_first.were_computed

    @property
    def count(self) -> int:
        """Responses that are copies among others that are not, each by itself or the short ones together."""
        rows = (CopyTotals(*row) for row in zip(self.telling, self.equal, strict=True))
        return self.short.copied + sum(row.is_copy_beside(self.others) for row in rows)

    @property
    def rows(self) -> CopiedRows:
        """The counts by which a response is recognised as a copy."""
        return CopiedRows(self.others, self.short.are_copies)


def is_copied(values: FloatArray, mu: FloatArray, copies: CopiedRows) -> bool:
    """Whether a response's column over the sampled tokens [T] is a copy of the sampler's, where others are not."""
    return bool(copies.among(row_totals(values, mu, np.zeros(values.size, dtype=np.int64), 1)).all())
