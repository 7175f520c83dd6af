"""Which columns of a log count: those that are there, hold numbers, and in which steps."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.importing.census import Census
from mismatch_probe.logs import LogChecks, LogFinding


@dataclass(frozen=True)
class Columns:
    """has_mu, has_pi, has_ref: the column is recorded, at least in some steps. left_out: steps in which one that counts
    is not. zeros_are_missing: columns (`log_mu`) whose zeros stand for numbers that were not recorded.
    """

    has_mu: bool
    has_pi: bool
    has_ref: bool
    left_out: frozenset[int | None]
    zeros_are_missing: frozenset[str]

    @classmethod
    def of(cls, census: Census, checks: LogChecks, findings: list[LogFinding]) -> "Columns":
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
            zeros_are_missing=frozenset(
                finding.column
                for finding in findings
                if finding.code == "zeros_for_missing" and finding.column is not None
            ),
        )

    def in_steps_that_count(self, rows: pa.Table) -> pa.Table:
        """The rows of the other steps than those left out."""
        if not self.left_out:
            return rows
        left_out = pa.array(sorted(self.left_out, key=str), type=pa.int64())
        return rows.filter(pc.invert(pc.is_in(rows["step"], value_set=left_out))).combine_chunks()
