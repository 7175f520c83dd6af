"""The checks of a whole log, added to a response at a time and made of many at once.

Their memory grows with steps, by 24 bytes a response, and not with tokens.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.checks.columns import (
    COLUMNS,
    LOG_PROBS,
    RESPONSES_OF_A_BLOCK,
    TOKENS_OF_A_BLOCK,
    ColumnSums,
    ResponseBlock,
)
from mismatch_probe.logs.checks.rows import COPIED_COLUMNS, Copies, MaskSums, RowSums
from mismatch_probe.logs.checks.sentences import (
    Alignment,
    alignment_findings,
    column_findings,
    copies_finding,
    mask_findings,
    row_findings,
    unrecorded_finding,
)
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.bases import (
    LARGEST_VOCABULARY,
    BaseSums,
    EntropySums,
    OtherBase,
    are_no_samples,
    moments,
    most_entropy,
)
from mismatch_probe.stats.sequences import Floats, is_usable

_UNSURE_ABOVE: Final = 0.5
_ROUNDING: Final = 0.05
"""Nats: BF16 knows 12 nats to that."""
_COLUMNS: Final = {
    "log_pi": "the trainer's log-probs",
    "log_mu": "the sampler's log-probs",
    "both": "the log-probs of both sides",
    "entropy": "the entropies",
}


@dataclass
class UnitSums:
    """Over sampled tokens: of pi's entropies, of both sides, and moments of -log mu."""

    entropies: EntropySums = field(default_factory=EntropySums)
    sides: BaseSums = field(default_factory=BaseSums)
    surprisal: Floats = field(default_factory=lambda: np.zeros(3))
    highest_entropy: float = 0.0
    """And where."""
    highest_at: str = ""

    def add(self, block: ResponseBlock) -> None:
        log_mu, log_pi, entropy = (
            block.log_mu[block.sampled],
            block.of_sampled("log_pi"),
            block.of_sampled("entropy_nats"),
        )
        has_mu, has_pi = is_usable(log_mu), is_usable(log_pi)
        self.surprisal = self.surprisal + moments(-log_mu[has_mu])
        both = has_mu & has_pi
        if both.any():
            self.sides = self.sides + BaseSums.of(log_pi[both], log_mu[both])
        usable = has_pi & np.isfinite(entropy)
        if not usable.any():
            return
        self.entropies = self.entropies + EntropySums.of(log_pi[usable], entropy[usable], _UNSURE_ABOVE)
        highest = int(np.where(usable, entropy, -np.inf).argmax())
        if entropy[highest] > self.highest_entropy:
            self.highest_entropy = float(entropy[highest])
            self.highest_at = block.responses[block.rows_of_sampled[highest]].where

    def __iadd__(self, other: Self) -> Self:
        if other.highest_entropy > self.highest_entropy:
            self.highest_entropy, self.highest_at = other.highest_entropy, other.highest_at
        self.entropies = self.entropies + other.entropies
        self.sides = self.sides + other.sides
        self.surprisal = self.surprisal + other.surprisal
        return self


def unit_findings(sums: UnitSums, vocabulary_size: int | None) -> Iterator[LogFinding]:
    """The findings on the units of entropies and of the sampler's log-probs."""
    size = write_count(vocabulary_size or LARGEST_VOCABULARY)
    most = most_entropy(vocabulary_size)
    base = sums.sides.base or sums.entropies.base
    if sums.highest_entropy > most + _ROUNDING:
        yield LogFinding.of(
            LogCode.BEYOND_VOCABULARY,
            column="entropy_nats",
            evidence={"highest": sums.highest_entropy, "most": most},
            highest=write_number(sums.highest_entropy),
            at=sums.highest_at,
            size=size,
            most=write_number(most),
        )
        base = sums.sides.base
    if base is not None:
        yield _in_base(base)
    if are_no_samples(sums.surprisal, vocabulary_size):
        mean = -float(sums.surprisal[1] / sums.surprisal[0])
        yield LogFinding.of(
            LogCode.BEYOND_VOCABULARY,
            "surprisal",
            column="log_mu",
            evidence={"mean": mean, "most": most},
            mean=write_number(mean),
            size=size,
            most=write_number(most),
        )


def _in_base(base: OtherBase) -> LogFinding:
    return LogFinding.of(
        LogCode.OTHER_BASE,
        columns=_COLUMNS[base.column],
        base=base.name,
        number=base.base,
        nats=base.nats,
        column={"both": None, "entropy": "entropy_nats"}.get(base.column, base.column),
        evidence={"base": base.base},
    )


@dataclass(frozen=True)
class MissingNumbers:
    """A column that holds no numbers."""

    code: LogCode
    steps: frozenset[int | None] | None
    """In these only; None: in the whole log."""


class LogChecks:
    """Add every response, then ask. Checks of parts of a log are added up with `+=`."""

    def __init__(self, vocabulary_size: int | None = None) -> None:
        self._vocabulary_size = vocabulary_size
        self._columns: dict[str, dict[int | None, ColumnSums]] = {name: defaultdict(ColumnSums) for name in COLUMNS}
        self._copies: dict[str, dict[int | None, Copies]] = {name: defaultdict(Copies) for name in COPIED_COLUMNS}
        self._present: set[str] = set()
        self._alignment = Alignment()
        self._units = UnitSums()
        self._rows = RowSums()
        self._masks = MaskSums()
        self._waiting: list[LoggedResponse] = []
        self._tokens_waiting = 0

    def add(self, response: LoggedResponse) -> None:
        self._waiting.append(response)
        self._tokens_waiting += response.prompt_token_ids.size + response.token_ids.size
        if self._tokens_waiting >= TOKENS_OF_A_BLOCK or len(self._waiting) >= RESPONSES_OF_A_BLOCK:
            self._look_at_waiting()

    def _look_at_waiting(self) -> None:
        if not self._waiting:
            return
        block = ResponseBlock(self._waiting)
        self._waiting, self._tokens_waiting = [], 0
        self._present |= {name for name in COLUMNS if block.has(name).any()}
        for step, of_step in block.by_step():
            for name in COLUMNS:
                self._columns[name][step].add(name, of_step)
            for name in COPIED_COLUMNS:
                self._copies[name][step].add(name, of_step)
        self._alignment.add(block)
        self._units.add(block)
        self._rows.add(block)
        self._masks.add(block)

    def __iadd__(self, other: Self) -> Self:
        self._look_at_waiting()
        other._look_at_waiting()
        for name, steps in other._columns.items():
            for step, sums in steps.items():
                self._columns[name][step] += sums
        for name, copies in other._copies.items():
            for step, of_step in copies.items():
                self._copies[name][step] += of_step
        self._present |= other._present
        self._alignment += other._alignment
        self._units += other._units
        self._rows += other._rows
        self._masks += other._masks
        return self

    def missing_numbers(self) -> dict[str, MissingNumbers]:
        """The columns that are there and hold no numbers, in the whole log or in some steps."""
        self._look_at_waiting()
        reasons = {name: self._why(name) for name in COLUMNS if name in self._present}
        return {name: why for name, why in reasons.items() if why is not None}

    def copies(self) -> dict[str, Copies]:
        """Of the columns some of whose responses are copies, though the column was recorded: those of the steps in
        which it was.
        """
        missing = self.missing_numbers()
        of_columns = {}
        for name, steps in self._copies.items():
            why = missing.get(name)
            if why is not None and why.steps is None:
                continue
            recorded_sums = self._copies_of(name, steps.keys() - ((why and why.steps) or frozenset()))
            if recorded_sums.count:
                of_columns[name] = recorded_sums
        return of_columns

    def findings(self) -> list[LogFinding]:
        """All there is to tell, by column and then of the rows."""
        missing = self.missing_numbers()
        findings: list[LogFinding] = []
        for name in COLUMNS:
            if name in self._present:
                why = missing.get(name)
                recorded_sums, unrecorded_sums = ColumnSums(), ColumnSums()
                for step, sums in self._columns[name].items():
                    if why is None or (why.steps is not None and step not in why.steps):
                        recorded_sums += sums
                    else:
                        unrecorded_sums += sums
                if why is not None:
                    all_copies = self._copies_of(name, why.steps).of_all
                    findings.append(unrecorded_finding(name, why.code, why.steps, unrecorded_sums, all_copies))
                findings += column_findings(name, recorded_sums)
        for name, copies in self.copies().items():
            findings.append(copies_finding(name, copies, self._rows.responses))
        if not missing.keys() & set(LOG_PROBS[:2]):
            findings += alignment_findings(self._alignment)
        findings += unit_findings(self._units, self._vocabulary_size)
        return [*findings, *row_findings(self._rows, self._vocabulary_size), *mask_findings(self._masks)]

    def _why(self, name: str) -> MissingNumbers | None:
        steps = self._columns[name]
        all_sums = ColumnSums()
        for sums in steps.values():
            all_sums += sums
        code = _why_unrecorded(all_sums, self._copies_of(name, None))
        if code is not None:
            return MissingNumbers(code, None)
        copies = self._copies.get(name, {})
        codes = {step: _why_unrecorded(sums, copies.get(step)) for step, sums in steps.items()}
        missing = frozenset(step for step, why in codes.items() if why is not None)
        if not missing:
            return None
        return MissingNumbers(next(why for why in codes.values() if why is not None), missing)

    def _copies_of(self, name: str, steps: Collection[int | None] | None) -> Copies:
        """Of a column in these steps, or in all."""
        copies = Copies()
        for step, of_step in self._copies.get(name, {}).items():
            if steps is None or step in steps:
                copies += of_step
        return copies


def _why_unrecorded(sums: ColumnSums, copies: Copies | None) -> LogCode | None:
    """The code of why a column holds no numbers of its own, None where it does."""
    return sums.why_unrecorded() or (LogCode.COPIED if copies is not None and copies.are_all else None)
