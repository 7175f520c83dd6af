"""Responses of a log side by side, and what a column of log-probs looks like, as sums that can be added up."""

import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.records.sequences import FloatArray, LoggedResponse
from mismatch_probe.stats.copies import CopiedRows, CopyTotals, ShortCopyTotals, are_alike, row_totals
from mismatch_probe.stats.sequences import (
    LEAST_SAMPLED,
    MISSING_LOG_PROB,
    MOST_ROUNDED_UP,
    Floats,
    Ints,
    Mask,
    of_sampled_tokens,
)
from mismatch_probe.stats.zeros import FEWEST_REFUTED, NearlySure, ZeroCounts, doubtful_stretches, refuted

TOKENS_OF_A_BLOCK: Final = 2**17
RESPONSES_OF_A_BLOCK: Final = 4096


@dataclass(frozen=True)
class ResponseBlock:
    """N responses, one or more, with T tokens together, of which S were sampled."""

    responses: Sequence[LoggedResponse]

    def by_step(self) -> Iterator[tuple[int | None, "ResponseBlock"]]:
        """The responses of each step, in the order of the log."""
        steps: dict[int | None, list[LoggedResponse]] = {}
        for response in self.responses:
            steps.setdefault(response.step, []).append(response)
        if len(steps) == 1:
            yield next(iter(steps)), self
            return
        for step, responses in steps.items():
            yield step, ResponseBlock(responses)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each response [N]."""
        return np.asarray([response.token_ids.size for response in self.responses], dtype=np.int64)

    @cached_property
    def rows(self) -> Ints:
        """The response that each token is of [T]."""
        return np.repeat(np.arange(len(self.responses)), self.lengths)

    @cached_property
    def sampled(self) -> Mask:
        """[T]."""
        return np.concatenate([response.sampled for response in self.responses])

    @cached_property
    def rows_of_sampled(self) -> Ints:
        """The response that each sampled token is of [S]."""
        return self.rows[self.sampled]

    @cached_property
    def num_sampled(self) -> Ints:
        """Sampled tokens of each response [N]."""
        return self.count(np.ones(self.rows_of_sampled.size, dtype=np.bool_))

    @cached_property
    def is_greedy(self) -> Mask:
        """Responses that were sampled at temperature 0 [N]."""
        return np.asarray([response.temperature == 0 for response in self.responses])

    @cached_property
    def is_alone(self) -> Mask:
        """Sampled tokens that the log shows to be the only one that could be drawn, so that their log-prob is 0 [S]."""
        return np.concatenate([_are_alone(response) for response in self.responses])[self.sampled]

    @cached_property
    def token_ids(self) -> Ints:
        """[T]."""
        return np.concatenate([response.token_ids for response in self.responses])

    @cached_property
    def log_mu(self) -> Floats:
        """The engine's log-probs [T], NaN where there is none or none that a sampled token can have."""
        return of_sampled_tokens(self.column("log_mu"))

    def has(self, name: str) -> Mask:
        """Responses that have a column [N]."""
        return self._present[name]

    def column(self, name: str) -> Floats:
        """A column as it was logged [T], NaN where a response has none."""
        return self._columns[name]

    def of_sampled(self, name: str) -> Floats:
        """The same of the sampled tokens [S]."""
        return self._of_sampled[name]

    def count(self, is_chosen: Mask) -> Ints:
        """Sampled tokens [S] that are chosen, of each response [N]."""
        return np.bincount(self.rows_of_sampled[is_chosen], minlength=len(self.responses))

    @cached_property
    def _present(self) -> dict[str, Mask]:
        return {
            name: np.asarray([getattr(response, name) is not None for response in self.responses]) for name in _COLUMNS
        }

    @cached_property
    def _columns(self) -> dict[str, Floats]:
        return {name: self._flat(name) for name in _COLUMNS}

    @cached_property
    def _of_sampled(self) -> dict[str, Floats]:
        return {name: values[self.sampled] for name, values in self._columns.items()}

    def _flat(self, name: str) -> Floats:
        present = self._present[name]
        if not present.any():
            return np.full(self.rows.size, np.nan)
        values: npt.NDArray[np.float64] = np.concatenate(
            [
                np.full(response.token_ids.size, np.nan) if values is None else values
                for response in self.responses
                for values in (getattr(response, name),)
            ],
            dtype=np.float64,
        )
        return values


def _are_alone(response: LoggedResponse) -> Mask:
    kept, size = response.kept, response.token_ids.size
    if kept is None or kept.ends.size != size or not kept.ids.size:
        return np.zeros(size, dtype=np.bool_)
    last = kept.ids[np.maximum(kept.ends - 1, 0)]
    return np.asarray((kept.sizes == 1) & (last == response.token_ids), dtype=np.bool_)


_COLUMNS: Final = ("log_mu", "log_pi", "log_ref", "entropy_nats")


LOG_PROBS: Final = ("log_mu", "log_pi", "log_ref")
COLUMNS: Final = (*LOG_PROBS, "entropy_nats")
ENOUGH_TOKENS: Final = 16
"""Fewer tokens may be all certain, or all alike."""

_NEARLY_ZERO: Final = -1e-4

_JOINED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"lowest": min, "highest": max}


@dataclass
class ColumnSums:
    """Counts over the sampled tokens of a column; lowest and highest are of those that are recorded."""

    tokens: int = 0
    num_recorded: int = 0
    absent: int = 0
    sentinels: int = 0
    zeros: int = 0
    zeros_alone: int = 0
    """Of tokens that are alone in the set that they were drawn from, as the log records it."""
    nearly_zero: int = 0
    zero_counts: ZeroCounts = field(default_factory=ZeroCounts)
    """Of all zeros, against the other side."""
    zeros_of_both: int = 0
    """Where that is exactly 0 too, without those of tokens that are alone."""
    nearly_sure: NearlySure = field(default_factory=NearlySure)
    """Of the tokens that tell how often the other side is below."""
    stretches: list[list[ZeroCounts]] = field(default_factory=list)
    """Of each response that has doubtful ones, the counts of each (`doubtful_stretches`)."""
    greedy_zeros: int = 0
    """Of responses that were sampled at temperature 0."""
    wrong_sign: int = 0
    lowest: float = np.inf
    highest: float = -np.inf

    def add(self, column: str, block: ResponseBlock) -> None:
        """Count the responses of a block by their sampled tokens."""
        values, has_one = block.of_sampled(column), block.has(column)
        self.tokens += values.size
        absent = np.isnan(values)
        self.absent += int(absent.sum())
        if not has_one.any():
            return
        is_log_prob = column in LOG_PROBS
        least = LEAST_SAMPLED if column == "log_mu" else MISSING_LOG_PROB
        sentinel = (values <= least) if is_log_prob else np.isinf(values)
        recorded_values = values[~(absent | sentinel)]
        zero = values == 0
        self.sentinels += int(sentinel.sum())
        self.num_recorded += recorded_values.size
        self.zeros += int(zero.sum())
        if is_log_prob:
            self.zeros_alone += int((zero & block.is_alone).sum())
        if recorded_values.size:
            self.lowest = min(self.lowest, float(recorded_values.min()))
            self.highest = max(self.highest, float(recorded_values.max()))
        if not is_log_prob:
            self.wrong_sign += int((recorded_values < -MOST_ROUNDED_UP).sum())
            return
        self.wrong_sign += int((recorded_values > MOST_ROUNDED_UP).sum())
        self.nearly_zero += int(((values < 0) & (values > _NEARLY_ZERO)).sum())
        self.greedy_zeros += int((zero & block.is_greedy[block.rows_of_sampled]).sum())
        self._add_other_side(column, block, values, zero)

    def _add_other_side(self, column: str, block: ResponseBlock, values: Floats, zero: Mask) -> None:
        """What the other side says of a column's sampled tokens [S], in the responses that have one."""
        is_mu = column == "log_mu"
        has_other = block.has("log_pi" if is_mu else "log_mu")
        if not has_other.any():
            return
        others = block.of_sampled("log_pi") if is_mu else block.log_mu[block.sampled]
        is_compared = zero & has_other[block.rows_of_sampled]
        self.nearly_sure += NearlySure.of(values, others)
        self.zero_counts += ZeroCounts.of(is_compared, others)
        self.zeros_of_both += int((zero & (others == 0) & ~block.is_alone).sum())
        doubtful = block.count(refuted(zero, others)) >= FEWEST_REFUTED
        ends = np.cumsum(block.num_sampled)
        for row in np.flatnonzero(doubtful):
            of_row = slice(ends[row] - block.num_sampled[row], ends[row])
            if stretches := doubtful_stretches(values[of_row], others[of_row]):
                self.stretches.append([ZeroCounts.of(stretch, others[of_row]) for stretch in stretches])

    def __iadd__(self, other: Self) -> Self:
        for name in (sums_field.name for sums_field in fields(self)):
            setattr(self, name, _JOINED.get(name, operator.add)(getattr(self, name), getattr(other, name)))
        return self

    def why_unrecorded(self) -> LogCode | None:
        """The code of why the column holds no numbers at all, None where it does."""
        if not self.num_recorded:
            return LogCode.NO_NUMBERS if self.tokens else None
        if self.zeros == self.num_recorded and self._are_all_zeros_for_missing:
            return LogCode.ALL_ZERO
        if self.num_recorded < ENOUGH_TOKENS:
            return None
        if self.lowest == self.highest != 0:
            return LogCode.CONSTANT
        return None

    @property
    def _are_all_zeros_for_missing(self) -> bool:
        if not self.zero_counts.compared:
            return self.num_recorded >= ENOUGH_TOKENS
        return self.zero_counts.stand_for_missing(self.nearly_sure, throughout=True)

    @property
    def filled(self) -> list[ZeroCounts]:
        """Of each response that zeros fill, wholly or a stretch of it, the counts of those that stand for no numbers by
        `stats.zeros`.
        """
        of_responses = (
            [counts for counts in stretches if counts.stand_for_missing(self.nearly_sure)]
            for stretches in self.stretches
        )
        return [sum(counts, ZeroCounts()) for counts in of_responses if counts]

    @property
    def scattered_zeros(self) -> ZeroCounts:
        """The zeros that do not fill responses, where these stand for what was not recorded too; else none."""
        zeros_of_fills = sum(self.filled, ZeroCounts())
        rest = ZeroCounts(
            zeros=self.zeros - zeros_of_fills.zeros,
            compared=self.zero_counts.compared - zeros_of_fills.compared,
            refuted=self.zero_counts.refuted - zeros_of_fills.refuted,
        )
        return rest if rest.stand_for_missing(self.nearly_sure) else ZeroCounts()

    @property
    def doubtful_zeros(self) -> int:
        """How many zeros may stand for what was not recorded, where no other side shows it, or one that is 0 there too:
        many, and nothing nearly 0.
        """
        zeros = self.zeros_of_both if self.zero_counts.compared else self.zeros - self.zeros_alone
        is_doubtful = self.num_recorded >= 1000 and not self.nearly_zero and zeros >= max(8, self.num_recorded * 1e-3)
        return zeros if is_doubtful else 0


COPIED_COLUMNS: Final = ("log_pi", "log_ref")


@dataclass
class Copies:
    """Of a column against the engine's: how many telling tokens each response that may be a copy has, and how many of
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
    """Whether a response's column over the sampled tokens [T] is a copy of the engine's, where others are not."""
    return bool(copies.among(row_totals(values, mu, np.zeros(values.size, dtype=np.int64), 1)).all())
