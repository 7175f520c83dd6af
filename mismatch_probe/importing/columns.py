"""Which columns of a log count: those that are there, hold numbers, and in which steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.importing.census import Census
from mismatch_probe.logs import LogChecks, is_copied
from mismatch_probe.records.legs import COLUMN_NAMES
from mismatch_probe.stats.copies import CopyTotals


@dataclass(frozen=True)
class Columns:
    """has_mu, has_pi, has_ref: the column is recorded, at least in some steps. left_out: steps in which one that counts
    is not. copies: columns that are the sampler's in some responses, with the totals of the others.
    """

    has_mu: bool
    has_pi: bool
    has_ref: bool
    left_out: frozenset[int | None]
    copies: Mapping[str, CopyTotals]

    @classmethod
    def of(cls, census: Census, checks: LogChecks) -> "Columns":
        """What the checks of a whole log say of them."""
        unrecorded = checks.unrecorded()
        there = {"log_mu": census.has_mu, "log_pi": census.has_pi, "log_ref": census.has_ref}
        empty = {name for name, why in unrecorded.items() if why.steps is None}
        count = {name: is_there and name not in empty for name, is_there in there.items()}
        steps = [why.steps for name, why in unrecorded.items() if count.get(name) and why.steps is not None]
        return cls(
            has_mu=count["log_mu"],
            has_pi=count["log_pi"],
            has_ref=count["log_ref"],
            left_out=frozenset().union(*steps),
            copies={name: copies.others for name, copies in checks.copies().items() if count[name]},
        )

    @property
    def leave_rows_out(self) -> bool:
        return bool(self.left_out or self.copies)

    def rows_that_count(self, rows: pa.Table) -> pa.Table:
        """The rows of the other steps than those left out, without those that are copies."""
        if self.left_out:
            left_out = pa.array(sorted(self.left_out, key=str), type=pa.int64())
            rows = rows.filter(pc.invert(pc.is_in(rows["step"], value_set=left_out)))
        for column, others in self.copies.items():
            rows = rows.filter(pa.array(_not_copied(rows, COLUMN_NAMES[column], others), type=pa.bool_()))
        return rows.combine_chunks()


def _not_copied(rows: pa.Table, column: str, others: CopyTotals) -> Iterator[bool]:
    for values, mu, mask in zip(*(rows[name] for name in (column, COLUMN_NAMES["log_mu"], "mask")), strict=True):
        if values.is_valid and mu.is_valid:
            sampled = mask.values.to_numpy(zero_copy_only=False)
            yield not is_copied(values.values.to_numpy()[sampled], mu.values.to_numpy()[sampled], others)
        else:
            yield True
