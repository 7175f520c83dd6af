"""Responses whose column is a copy of the sampler's, beside others whose column was computed, or all of them."""

from array import array
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.logs.checks.block import Block
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.stats.copies import CopyTotals, are_alike, copy_totals

COPIED_COLUMNS: Final = ("log_pi", "log_ref")


@dataclass
class Copies:
    """Of a column against the sampler's: how many telling tokens each response that may be a copy has, and how many of
    them are equal, 4 bytes each; and the totals of the other responses, and of all.
    """

    telling: "array[int]" = field(default_factory=lambda: array("I"))
    equal: "array[int]" = field(default_factory=lambda: array("I"))
    others: CopyTotals = field(default_factory=CopyTotals)
    whole: CopyTotals = field(default_factory=CopyTotals)

    def add(self, column: str, block: Block) -> None:
        """Count the responses of a block that have both columns, by their sampled tokens."""
        if not (block.has(column) & block.has("log_mu")).any():
            return
        columns = block.of_sampled(column), block.of_sampled("log_mu")
        totals = copy_totals(*columns, block.rows_of_sampled, len(block.responses))
        may_be_copies = are_alike(totals)
        telling, equal, _ = totals[may_be_copies].T.astype(np.int64)
        self.telling.extend(telling.tolist())
        self.equal.extend(equal.tolist())
        self.others += CopyTotals(*totals[~may_be_copies].sum(axis=0).tolist())
        self.whole += CopyTotals(*totals.sum(axis=0).tolist())

    def __iadd__(self, other: Self) -> Self:
        self.telling.extend(other.telling)
        self.equal.extend(other.equal)
        self.others += other.others
        self.whole += other.whole
        return self

    @property
    def are_all(self) -> bool:
        """Whether the column is a copy throughout, and not only in some responses beside others that were computed."""
        return self.whole.is_copy and not self.others.were_computed

    @property
    def count(self) -> int:
        """Responses that are copies beside the others."""
        if not self.telling:
            return 0
        rows = (CopyTotals(*row) for row in zip(self.telling, self.equal, strict=True))
        return sum(row.is_copy_beside(self.others) for row in rows)


def is_copied(values: FloatArray, mu: FloatArray, others: CopyTotals) -> bool:
    """Whether a response's column over the sampled tokens [T] is a copy of the sampler's, beside other responses."""
    return CopyTotals.of(values, mu).is_copy_beside(others)
