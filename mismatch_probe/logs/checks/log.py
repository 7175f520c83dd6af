"""The checks of a whole log, added to a response at a time and made of many at once.

Their memory grows with steps, by 24 bytes a response, and not with tokens.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.checks.columns import (
    COLUMNS,
    COPIED_COLUMNS,
    LOG_PROBS,
    RESPONSES_OF_A_BLOCK,
    TOKENS_OF_A_BLOCK,
    ColumnSums,
    Copies,
    ResponseBlock,
)
from mismatch_probe.logs.checks.rows import MaskSums, RowSums
from mismatch_probe.logs.checks.sentences import (
    column_findings,
    copies_finding,
    mask_findings,
    row_findings,
    unrecorded_finding,
)
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.sequences import FloatArray, LoggedResponse
from mismatch_probe.stats.bases import (
    LARGEST_VOCABULARY,
    BaseSums,
    EntropySums,
    OtherBase,
    are_no_samples,
    moments,
    most_entropy,
)
from mismatch_probe.stats.sequences import MOST_ROUNDED_UP, Floats, is_usable

_UNSURE_ABOVE: Final = 0.5
_ROUNDING: Final = 0.05
"""Nats: BF16 knows 12 nats to that."""
_COLUMNS: Final = {
    "log_pi": "the training path's log-probs",
    "log_mu": "the engine's log-probs",
    "both": "the log-probs of both sides",
    "entropy": "the entropies",
}


SHIFTS: Final = (-1, 0, 1)
_FEWEST_TOKENS: Final = 64
_LEAST_SPREAD: Final = 0.1
"""Standard deviation in nats under which rounding decides the correlation."""
_CLEARLY: Final = 0.3
_BELONGS: Final = 0.5
_LEAST: Final = -20.0
"""Nats: a lower log-prob counts as this, or one token would decide the correlation."""


@dataclass
class Alignment:
    """Sums over pairs of log mu at token t and log pi at token t + shift, [shift, (n, x, y, xx, yy, xy)]."""

    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(SHIFTS), 6)))

    def add(self, block: ResponseBlock) -> None:
        mu, pi, rows = block.log_mu, block.column("log_pi"), block.rows
        counts_mu, counts_pi = block.sampled & _can_be(mu), block.sampled & _can_be(pi)
        is_recorded = np.ones(len(block.responses), dtype=np.bool_)
        for counts, side in ((counts_mu, mu), (counts_pi, pi)):  # zeros stand for what was not recorded
            is_recorded &= np.bincount(rows[counts & (side != 0)], minlength=is_recorded.size) > 0
        counts_mu &= is_recorded[rows]
        for index, shift in enumerate(SHIFTS):
            first = slice(max(0, -shift), mu.size - max(0, shift))
            second = slice(max(0, shift), mu.size - max(0, -shift))
            both = counts_mu[first] & counts_pi[second] & (rows[first] == rows[second])
            x, y = (np.maximum(side, _LEAST) for side in (mu[first][both], pi[second][both]))
            self.sums[index] += (x.size, x.sum(), y.sum(), x @ x, y @ y, x @ y)

    def __iadd__(self, other: Self) -> Self:
        self.sums = self.sums + other.sums
        return self

    @property
    def correlations(self) -> dict[int, float] | None:
        """By shift; None where the log-probs are too few or too alike to tell."""
        n, x, y, xx, yy, xy = self.sums.T
        if n.min() < _FEWEST_TOKENS:
            return None
        spread_x = np.sqrt(np.maximum(xx / n - (x / n) ** 2, 0))
        spread_y = np.sqrt(np.maximum(yy / n - (y / n) ** 2, 0))
        if min(spread_x.min(), spread_y.min()) < _LEAST_SPREAD:
            return None
        values = (xy / n - x * y / n**2) / (spread_x * spread_y)
        return dict(zip(SHIFTS, values.tolist(), strict=True))

    @property
    def shift(self) -> int:
        """By how many tokens pi's column is behind mu's; 0 where it is not or nothing shows it."""
        by_shift = self.correlations
        if by_shift is None:
            return 0
        best = max(by_shift, key=lambda shift: by_shift[shift])
        return best if by_shift[best] > _BELONGS and by_shift[best] > by_shift[0] + _CLEARLY else 0

    @property
    def is_unrelated(self) -> bool:
        """Whether the two sides do not go together at any shift."""
        by_shift = self.correlations
        return by_shift is not None and max(by_shift.values()) < _BELONGS


def _can_be(log_probs: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether each is a log-prob; squares of what is far above 0 have no sum."""
    return is_usable(log_probs) & (log_probs <= MOST_ROUNDED_UP)


def alignment_findings(alignment: Alignment) -> Iterator[LogFinding]:
    """Whether one side is shifted, or the two do not belong together."""
    correlations = alignment.correlations
    if correlations is None:
        return
    evidence: dict[str, object] = {"correlations": {str(shift): value for shift, value in correlations.items()}}
    words = ", ".join(f"{value:.2f} at a shift of {shift}" for shift, value in correlations.items())
    if alignment.shift:
        side_of_shift = "late" if alignment.shift > 0 else "early"
        yield LogFinding.of(LogCode.SHIFTED, column="log_pi", evidence=evidence, late=side_of_shift, correlations=words)
    elif alignment.is_unrelated:
        yield LogFinding.of(LogCode.UNRELATED, column="log_pi", evidence=evidence, correlations=words)


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
    """The findings on the units of entropies and of the engine's log-probs."""
    size = write_count(vocabulary_size or LARGEST_VOCABULARY)
    most = most_entropy(vocabulary_size)
    base = sums.sides.base or (None if sums.sides.differ else sums.entropies.base)
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

    def __init__(self, vocabulary_size: int | None = None, stop_ids: frozenset[int] = frozenset()) -> None:
        self._vocabulary_size = vocabulary_size
        self._columns: dict[str, dict[int | None, ColumnSums]] = {name: defaultdict(ColumnSums) for name in COLUMNS}
        self._copies: dict[str, dict[int | None, Copies]] = {name: defaultdict(Copies) for name in COPIED_COLUMNS}
        self._present: set[str] = set()
        self._alignment = Alignment()
        self._units = UnitSums()
        self._rows = RowSums()
        self._masks = MaskSums(stop_ids)
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
