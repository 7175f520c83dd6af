"""What a column of log-probs looks like, as sums over the tokens of one step that can be added up."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.logs.findings import LogCode
from mismatch_probe.records.sequences import FloatArray, LoggedResponse
from mismatch_probe.stats.sequences import (
    LEAST_SAMPLED,
    MISSING_LOG_PROB,
    MOST_ROUNDED_UP,
    of_sampled_tokens,
)
from mismatch_probe.stats.zeros import NearlySure, ZeroCounts, doubtful_stretches

LOG_PROBS: Final = ("log_mu", "log_pi", "log_ref")
COLUMNS: Final = (*LOG_PROBS, "entropy_nats")
ENOUGH_TOKENS: Final = 16
"""Fewer tokens may be all certain, or all alike."""

_NEARLY_ZERO: Final = -1e-4

_JOINED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"lowest": min, "highest": max}


@dataclass
class ColumnSums:
    """Counts over the sampled tokens of a column; lowest and highest are of those that are recorded.

    zero_counts: of all zeros, against the other side; zeros_of_both: where that is exactly 0 too. nearly_sure: of the
    tokens that tell how often the other side is below. stretches: of each response that has doubtful ones, the counts
    of each (`doubtful_stretches`). greedy_zeros: of responses that were sampled at temperature 0.
    """

    tokens: int = 0
    recorded: int = 0
    absent: int = 0
    sentinels: int = 0
    zeros: int = 0
    nearly_zero: int = 0
    zero_counts: ZeroCounts = field(default_factory=ZeroCounts)
    zeros_of_both: int = 0
    nearly_sure: NearlySure = field(default_factory=NearlySure)
    stretches: list[list[ZeroCounts]] = field(default_factory=list)
    greedy_zeros: int = 0
    wrong_sign: int = 0
    lowest: float = np.inf
    highest: float = -np.inf

    def add(
        self, column: str, sampled: Mapping[str, FloatArray | None], num_tokens: int, *, is_greedy: bool = False
    ) -> None:
        """Count a response by its columns [num_tokens] over the sampled tokens; None: it has no such column.

        is_greedy: it was sampled at temperature 0.
        """
        values, mu = sampled[column], sampled["log_mu"]
        others = sampled["log_pi"] if column == "log_mu" else None if mu is None else of_sampled_tokens(mu)
        self.tokens += num_tokens
        if values is None:
            self.absent += num_tokens
            return
        is_log_prob = column in LOG_PROBS
        absent = np.isnan(values)
        least = LEAST_SAMPLED if column == "log_mu" else MISSING_LOG_PROB
        sentinel = (values <= least) if is_log_prob else np.isinf(values)
        recorded = values[~(absent | sentinel)]
        zero = values == 0
        self.absent += int(absent.sum())
        self.sentinels += int(sentinel.sum())
        self.recorded += recorded.size
        self.zeros += int(zero.sum())
        if recorded.size:
            self.lowest = min(self.lowest, float(recorded.min()))
            self.highest = max(self.highest, float(recorded.max()))
        if not is_log_prob:
            self.wrong_sign += int((recorded < -MOST_ROUNDED_UP).sum())
            return
        self.wrong_sign += int((recorded > MOST_ROUNDED_UP).sum())
        self.nearly_zero += int(((values < 0) & (values > _NEARLY_ZERO)).sum())
        self.greedy_zeros += int(zero.sum()) if is_greedy else 0
        if others is not None:
            self.nearly_sure += NearlySure.of(values, others)
            self.zero_counts += ZeroCounts.of(zero, others)
            self.zeros_of_both += int((zero & (others == 0)).sum())
            if stretches := doubtful_stretches(values, others):
                self.stretches.append([ZeroCounts.of(stretch, others) for stretch in stretches])

    def __iadd__(self, other: Self) -> Self:
        for name in (one.name for one in fields(self)):
            setattr(self, name, _JOINED.get(name, operator.add)(getattr(self, name), getattr(other, name)))
        return self

    def why_unrecorded(self) -> LogCode | None:
        """The code of why the column holds no numbers at all, None where it does."""
        if not self.recorded:
            return LogCode.NO_NUMBERS if self.tokens else None
        if self.zeros == self.recorded and self._are_all_zeros_for_missing:
            return LogCode.ALL_ZERO
        if self.recorded < ENOUGH_TOKENS:
            return None
        if self.lowest == self.highest != 0:
            return LogCode.CONSTANT
        return None

    @property
    def _are_all_zeros_for_missing(self) -> bool:
        if not self.zero_counts.compared:
            return self.recorded >= ENOUGH_TOKENS
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
        filled = sum(self.filled, ZeroCounts())
        rest = ZeroCounts(
            zeros=self.zeros - filled.zeros,
            compared=self.zero_counts.compared - filled.compared,
            refuted=self.zero_counts.refuted - filled.refuted,
        )
        return rest if rest.stand_for_missing(self.nearly_sure) else ZeroCounts()

    @property
    def doubtful_zeros(self) -> int:
        """How many zeros may stand for what was not recorded, where no other side tells, or one that is 0 there too:
        many, and nothing nearly 0.
        """
        zeros = self.zeros_of_both if self.zero_counts.compared else self.zeros
        is_doubtful = self.recorded >= 1000 and not self.nearly_zero and zeros >= max(8, self.recorded * 1e-3)
        return zeros if is_doubtful else 0


def sampled_values(response: LoggedResponse, column: str) -> FloatArray | None:
    """A column over the tokens that the policy sampled."""
    values: FloatArray | None = getattr(response, column)
    return None if values is None else values[response.sampled]
