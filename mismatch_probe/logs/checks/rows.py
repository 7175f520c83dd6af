"""What the rows of a log look like: masks, ids, copied columns. Sums that can be added up."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.logs.checks.columns import RESPONSES_OF_A_BLOCK, ResponseBlock
from mismatch_probe.stats.sequences import Floats, Ints, Mask, is_usable
from mismatch_probe.stats.zeros import LEVELS_OF_SURENESS, ZerosAtEdge, sureness_levels

_FAR_BELOW: Final = -1.0
_UNLIKELY_NATS: Final = 20.0
_UNLIKELY_TOKENS: Final = 64
_RUN_OF_PADDING: Final = 8
_FEW_ZEROS: Final = 0.05
"""Share of a response's other tokens; with more, 0 is what its sampler writes where it is sure."""


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
    """Responses [N] by the engine's log-probs, or by the length where there are none."""
    mu = block.log_mu[block.sampled]
    has_logprob = is_usable(mu)
    surprisal = np.bincount(
        block.rows_of_sampled[has_logprob], weights=-mu[has_logprob], minlength=len(block.responses)
    )
    has_mu = block.count(has_logprob & (mu != 0)) > 0
    return np.where(has_mu, surprisal > _UNLIKELY_NATS, block.num_sampled >= _UNLIKELY_TOKENS)


def _end_in_padding(block: ResponseBlock) -> Mask:
    """Responses [N] that start or end with sampled tokens of one id without a log-prob, and have others. A text that
    repeats itself has real zeros where the engine is sure: where it has more elsewhere, a trainer must refute them.
    """
    mu, pi, lengths = block.column("log_mu"), block.column("log_pi"), block.lengths
    long = np.flatnonzero(block.has("log_mu") & (lengths > _RUN_OF_PADDING))
    ends = np.cumsum(lengths)[long]
    end_in_padding = np.zeros(lengths.size, dtype=np.bool_)
    for first in (ends - lengths[long], ends - _RUN_OF_PADDING):
        of_run = first[:, None] + np.arange(_RUN_OF_PADDING)
        ids, values = block.token_ids[of_run], mu[of_run]
        is_run = (block.sampled[of_run] & (ids == ids[:, :1]) & (np.isnan(values) | (values == 0))).all(axis=1)
        run_ids = np.zeros(lengths.size, dtype=np.int64)
        run_ids[long] = ids[:, 0]
        is_other = block.sampled & (block.token_ids != run_ids[block.rows])
        others = np.bincount(block.rows[is_other], minlength=lengths.size)
        zeros = np.bincount(block.rows[is_other & (mu == 0)], minlength=lengths.size)
        is_refuted = (np.isnan(values) | (pi[of_run] < _FAR_BELOW)).any(axis=1)
        end_in_padding[long] |= is_run & (is_refuted | (zeros <= _FEW_ZEROS * others)[long])
    sampled_mu = block.of_sampled("log_mu")
    return end_in_padding & (block.count(sampled_mu != 0) > 0)


LONGEST_HEAD: Final = 32
_RUNS_FOR_A_HEAD: Final = 256
MOST_AFTER_STOP: Final = 5
_LEAST_TEMPERATURE: Final = 0.5
"""At lower ones an unlikely token may be drawn each time."""
_MOST_HASHES: Final = 64
_NOT_ZERO: Final = -3e-3
"""A trainer that finds a token less likely does not round it to 0; nor does an engine that writes such tokens down."""


@dataclass(frozen=True)
class MaskRuns:
    """The R stretches of sampled tokens of a block, without responses that were sampled almost without chance."""

    starts: Ints
    ends: Ints
    is_first: Mask
    """Of its response."""
    rows: Ints

    @classmethod
    def of(cls, block: ResponseBlock) -> "MaskRuns":
        cold = [each.temperature is not None and each.temperature < _LEAST_TEMPERATURE for each in block.responses]
        sampled = block.sampled & ~np.asarray(cold, dtype=np.bool_)[block.rows]
        is_new_row = np.diff(block.rows, prepend=-1) != 0
        is_last_of_row = np.diff(block.rows, append=-1) != 0
        starts = np.flatnonzero(sampled & (is_new_row | ~np.concatenate([[False], sampled[:-1]])))
        ends = np.flatnonzero(sampled & (is_last_of_row | ~np.concatenate([sampled[1:], [False]]))) + 1
        rows = block.rows[starts]
        return cls(starts, ends, np.diff(rows, prepend=-1) != 0, rows)


def _zero_counts() -> Ints:
    return np.zeros(LONGEST_HEAD, dtype=np.int64)


@dataclass
class HeadSums:
    """Stretches of sampled tokens that begin alike, by how many of their first tokens do [K]."""

    head: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The commonest beginning."""
    runs: int = 0
    alike: Ints = field(default_factory=_zero_counts)
    missing: Ints = field(default_factory=_zero_counts)
    """The engine has no log-prob of a token of the beginning, or it is exactly 0 where the trainer's is far below."""
    surprisal: Floats = field(default_factory=lambda: np.zeros(LONGEST_HEAD))
    """The sum of -log p, by the engine, or the trainer where the engine has nothing or exactly 0."""
    hashes: set[int] = field(default_factory=set)
    """Of a few different stretches."""

    def add(self, block: ResponseBlock, starts: Ints, ends: Ints) -> None:
        if not starts.size:
            return
        starts, ends = starts[:RESPONSES_OF_A_BLOCK], ends[:RESPONSES_OF_A_BLOCK]
        places = starts[:, None] + np.arange(LONGEST_HEAD)
        is_inside = places < ends[:, None]
        places = np.minimum(places, block.token_ids.size - 1)
        ids = np.where(is_inside, block.token_ids[places], -1)
        if not self.head.size:
            self.head = _commonest_beginning(ids[:_RUNS_FOR_A_HEAD])
        width = self.head.size
        is_alike = np.logical_and.accumulate(ids[:, :width] == self.head, axis=1)
        mu, pi = (block.column(name)[places[:, :width]] for name in ("log_mu", "log_pi"))
        mu = np.where(is_usable(mu), mu, np.nan)
        is_refuted = (mu == 0) & (pi < _FAR_BELOW)
        log_p = np.where(np.isnan(mu) | (mu == 0), np.where(is_usable(pi), pi, 0.0), mu)
        self.runs += starts.size
        self.alike[:width] += is_alike.sum(axis=0)
        self.missing[:width] += (is_alike & (np.isnan(mu) | is_refuted)).sum(axis=0)
        self.surprisal[:width] -= np.where(is_alike, log_p, 0.0).sum(axis=0)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if len(self.hashes) >= _MOST_HASHES:
                break
            self.hashes.add(hash(block.token_ids[start:end].tobytes()))

    def __iadd__(self, other: Self) -> Self:
        width = (
            self.head.size if not other.runs else other.head.size if not self.runs else _alike(self.head, other.head)
        )
        self.head = (self.head if self.runs else other.head)[:width]
        self.runs += other.runs
        for name in ("alike", "missing", "surprisal"):
            total = getattr(self, name) + getattr(other, name)
            total[width:] = 0
            setattr(self, name, total)
        self.hashes = set(list(self.hashes | other.hashes)[:_MOST_HASHES])
        return self


def _alike(first: Ints, second: Ints) -> int:
    length = min(first.size, second.size)
    return int(np.logical_and.accumulate(first[:length] == second[:length]).sum())


def _commonest_beginning(ids: Ints) -> Ints:
    """Token by token the one that most of those which began alike go on with; ids [R, K], -1 behind their ends."""
    head: list[int] = []
    while ids.size and len(head) < ids.shape[1]:
        tokens, counts = np.unique(ids[:, len(head)], return_counts=True)
        token = int(tokens[counts.argmax()])
        if token < 0:
            break
        ids = ids[ids[:, len(head)] == token]
        head.append(token)
    return np.asarray(head, dtype=np.int64)


def _two_counts() -> Ints:
    return np.zeros(2, dtype=np.int64)


def _two_zeros() -> list[ZerosAtEdge]:
    return [ZerosAtEdge(), ZerosAtEdge()]


@dataclass
class EdgeSums:
    """Counts of the tokens at the edges of masks [inside a response, at its start or end], and of all others."""

    firsts: Ints = field(default_factory=_two_counts)
    """The first token under a mask, of responses with a column of the engine."""
    firsts_missing: Ints = field(default_factory=_two_counts)
    """Of these, that have no log-prob of the engine, or 0 where the trainer's is far below."""
    firsts_empty: Ints = field(default_factory=_two_counts)
    """Of these, that have no log-prob of the engine, or 0, and are not quite sure to the trainer."""
    lasts: Ints = field(default_factory=_two_counts)
    lasts_missing: Ints = field(default_factory=_two_counts)
    lasts_empty: Ints = field(default_factory=_two_counts)
    firsts_zeros: list[ZerosAtEdge] = field(default_factory=_two_zeros)
    lasts_zeros: list[ZerosAtEdge] = field(default_factory=_two_zeros)
    inner_by_sureness: Ints = field(default_factory=lambda: np.zeros((LEVELS_OF_SURENESS, 2), dtype=np.int64))
    """Tokens under a mask that are at no edge [level, the engine has exactly 0]."""
    inner: int = 0
    inner_missing: int = 0
    inner_sure: int = 0
    """Of these, that the trainer is nearly sure of, and not quite."""
    inner_sure_empty: int = 0
    before: int = 0
    """Tokens outside right before a mask, at the start of a response or at the end of 3 or more outside."""
    before_recorded: int = 0
    """Of these, that have a log-prob other than 0."""
    after: int = 0
    after_recorded: int = 0
    outside: int = 0
    """All others outside."""
    outside_recorded: int = 0

    def add(self, block: ResponseBlock, runs: MaskRuns) -> None:
        mu = block.column("log_mu")
        has_mu = block.has("log_mu")[block.rows]
        is_missing = has_mu & (~is_usable(mu) | ((mu == 0) & (block.column("log_pi") < _FAR_BELOW)))
        is_recorded = is_usable(mu) & (mu != 0)
        pi = block.column("log_pi")
        is_empty = has_mu & (~is_usable(mu) | ((mu == 0) & (pi < _NOT_ZERO)))
        is_sure = has_mu & (pi > _FAR_BELOW) & (pi < _NOT_ZERO)
        firsts, lasts = runs.starts, runs.ends - 1
        is_inner = np.zeros(block.rows.size, dtype=np.bool_)
        is_inner[block.sampled] = True
        is_inner[firsts] = is_inner[lasts] = False
        ends_of_rows = np.cumsum(block.lengths)
        has_both, levels, is_zero = (
            has_mu & block.has("log_pi")[block.rows] & ~np.isnan(pi),
            sureness_levels(pi),
            mu == 0,
        )
        of_inner = is_inner & has_both & ~np.isnan(mu)
        np.add.at(self.inner_by_sureness, (levels[of_inner], is_zero[of_inner].astype(np.int64)), 1)
        for name, places, is_outer in (
            ("firsts", firsts, runs.starts == (ends_of_rows - block.lengths)[runs.rows]),
            ("lasts", lasts, runs.ends == ends_of_rows[runs.rows]),
        ):
            group = is_outer.astype(np.int64)
            setattr(self, name, getattr(self, name) + np.bincount(group[has_mu[places]], minlength=2))
            for zeros, is_here in zip(getattr(self, f"{name}_zeros"), (~is_outer, is_outer), strict=True):
                at = places[is_here & has_both[places]]
                zeros.add(block.token_ids[at], is_zero[at], levels[at])
            for kind, is_one in (("missing", is_missing), ("empty", is_empty)):
                counted = getattr(self, f"{name}_{kind}") + np.bincount(group[is_one[places]], minlength=2)
                setattr(self, f"{name}_{kind}", counted)
        self.inner += int((is_inner & has_mu).sum())
        self.inner_missing += int((is_inner & is_missing).sum())
        self.inner_sure += int((is_inner & is_sure).sum())
        self.inner_sure_empty += int((is_inner & is_sure & is_empty).sum())
        before, after = _outer_edges(block, runs)
        is_other = ~block.sampled & has_mu
        is_other[before] = is_other[after] = False
        self.before += before.size
        self.before_recorded += int(is_recorded[before].sum())
        self.after += after.size
        self.after_recorded += int(is_recorded[after].sum())
        self.outside += int(is_other.sum())
        self.outside_recorded += int((is_other & is_recorded).sum())

    def __iadd__(self, other: Self) -> Self:
        for name, value in vars(other).items():
            if isinstance(value, list):
                for mine, others in zip(getattr(self, name), value, strict=True):
                    mine += others
            else:
                setattr(self, name, getattr(self, name) + value)
        return self


def _outer_edges(block: ResponseBlock, runs: MaskRuns) -> tuple[Ints, Ints]:
    """The places right before and right behind stretches of sampled tokens, where what lies outside is no single token
    that a mask takes out of its middle.
    """
    row_ends = np.cumsum(block.lengths)
    row_starts = row_ends - block.lengths
    starts, ends = row_starts[runs.rows], row_ends[runs.rows]
    previous = np.where(runs.is_first, starts, np.concatenate([[0], runs.ends[:-1]])[: runs.ends.size])
    is_last = np.concatenate([runs.is_first[1:], [True]])[: runs.ends.size]
    following = np.where(is_last, ends, np.concatenate([runs.starts[1:], [0]])[: runs.ends.size])
    before = (runs.starts - previous >= np.where(runs.is_first, 1, 3)) & (runs.starts > starts)
    after = (following - runs.ends >= np.where(is_last, 1, 3)) & (runs.ends < ends)
    return runs.starts[before] - 1, runs.ends[after]


@dataclass
class StopSums:
    """Stretches of sampled tokens that hold a token at which the checkpoint stops, by the tokens behind the first."""

    after_stop: Ints = field(default_factory=lambda: np.zeros((2, MOST_AFTER_STOP + 1), dtype=np.int64))
    """[inside a response, at its end; so many tokens, the last: or more]."""

    def add(self, block: ResponseBlock, runs: MaskRuns, stop_ids: frozenset[int]) -> None:
        places = np.flatnonzero(np.isin(block.token_ids, sorted(stop_ids)))
        first = np.searchsorted(places, runs.starts)
        has_stop = first < places.size
        has_stop[has_stop] = places[first[has_stop]] < runs.ends[has_stop]
        num_after = runs.ends[has_stop] - 1 - places[first[has_stop]]
        is_outer = runs.ends[has_stop] == np.cumsum(block.lengths)[runs.rows[has_stop]]
        np.add.at(self.after_stop, (is_outer.astype(np.int64), np.minimum(num_after, MOST_AFTER_STOP)), 1)

    def __iadd__(self, other: Self) -> Self:
        self.after_stop = self.after_stop + other.after_stop
        return self


@dataclass
class MaskSums:
    """What stands at the edges of masks. stop_ids: of the checkpoint, where that is known."""

    stop_ids: frozenset[int] = frozenset()
    first_heads: HeadSums = field(default_factory=HeadSums)
    """Of the first stretch of each response."""
    later_heads: HeadSums = field(default_factory=HeadSums)
    edges: EdgeSums = field(default_factory=EdgeSums)
    stops: StopSums = field(default_factory=StopSums)

    def add(self, block: ResponseBlock) -> None:
        runs = MaskRuns.of(block)
        if self.stop_ids:
            self.stops.add(block, runs, self.stop_ids)
        self.first_heads.add(block, runs.starts[runs.is_first], runs.ends[runs.is_first])
        self.later_heads.add(block, runs.starts[~runs.is_first], runs.ends[~runs.is_first])
        self.edges.add(block, runs)

    def __iadd__(self, other: Self) -> Self:
        self.first_heads += other.first_heads
        self.later_heads += other.later_heads
        self.edges += other.edges
        self.stops += other.stops
        return self
