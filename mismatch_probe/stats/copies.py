"""Whether one column of log-probs is a copy of another: equal bit for bit where two computations are not.

Two computations in FP32 are equal at most tokens that they are nearly sure of (19 of 20 between -0.001 and -0.01) and
at a few others, and differ elsewhere by their last digits. Columns that were rounded, to 16 bits or to decimals, are
equal wherever both sides round alike, and differ elsewhere by one step, and hardly ever by two, whatever a few tokens
differ by beyond that. A copy is equal at nearly all tokens, and where something else was written over it, as at the
first token of each response, it differs by any amount: by two steps nearly as often as by one.
"""

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np

from mismatch_probe.stats.sequences import MOST_ROUNDED_UP, Floats, Ints, Mask, Reals, is_usable
from mismatch_probe.stats.totals import Totals

FEWEST_TELLING: Final = 16
"""Two computations in FP32 are all equal at so many tokens in one of ten million cases."""
CERTAIN_NATS: Final = 0.01
"""Log-probs nearer to 0 are often the same on both sides without being a copy; what one hides there is no more."""
LEAST_EQUAL: Final = 0.8
"""Of a copy's tokens; two computations in 16 bits, written in FP32, are equal at 0.02, and in FP32 at 0.3."""

_COMPUTED: Final = 0.5
_FP32_NATS: Final = 2e-5
"""As far as two computations in FP32 are apart."""
_MANTISSA_LEFT_OUT: Final = (16, 13)
"""Bits of FP32's mantissa that BF16 and FP16 do not have."""
_DECIMALS: Final = (1, 2, 3, 4)
_ONE_STEP_OVER_TWO: Final = 4
"""The most tokens that differ by one step for each that differs by two, where the differences are wider than a step."""
_MOST_NEAR: Final = 5
"""Of those that differ by one step beyond that, as chance has it in a copy."""
_BY_CHANCE: Final = 1e-6
_COARSEST: Final = 0.05
"""Of 1 - p: steps above it hide what 16 bits make of a log-prob, which is about a hundredth of 1 - p or more."""
_MOST_EQUAL: Final = 0.9
"""Of fine tokens that were computed in 16 bits, however sure a response is of them."""
_IN_16_BITS: Final = 0.25
"""Fewer of the fine tokens are equal where both sides were computed in 16 bits and written with all digits."""
_FEWEST_FINE: Final = 2


class RowTotals(NamedTuple):
    """Of N rows. of_all: as `CopyTotals` [N, 3]; fine: of the telling tokens that no rounding to few digits made equal:
    how many there are, how many are equal, and how many of the others are apart by FP32's last digits alone [N, 3].
    sums: of the first side's telling log-probs, which tell rows apart [N].
    """

    of_all: Floats
    fine: Floats
    sums: Floats

    @property
    def are_short(self) -> Mask:
        """Rows that are too short to be judged each by itself, and are equal throughout [N]."""
        telling, equal, _ = self.of_all.T
        return np.asarray((telling > 0) & (telling < FEWEST_TELLING) & (equal == telling))

    @property
    def may_be_short_copies(self) -> Mask:
        """Of these, the rows that are judged together [N]."""
        return self.are_short & (self.fine[:, 0] >= _FEWEST_FINE)


@dataclass(frozen=True)
class CopyTotals(Totals):
    """Of the tokens that a side is surely not certain of: how many there are, how many are equal bit for bit on both
    sides once written in FP32, and how many of the others are apart by rounding alone: those that are `near`, by FP32's
    last digits or by one step of the 16-bit format or of the decimals that both are written in, less four times those
    that are as far apart again.
    """

    counts = ("telling", "equal")
    signed = ("near",)

    telling: float = 0.0
    equal: float = 0.0
    near: float = 0.0

    @classmethod
    def of(cls, first: Reals, second: Reals) -> Self:
        """Of two columns of log-probs [T], where both have one."""
        [totals] = copy_totals(first, second, np.zeros(first.size, dtype=np.int64), 1)
        return cls(*totals.tolist())

    @property
    def share(self) -> float:
        """Of the telling tokens, those that are equal."""
        return self.equal / self.telling if self.telling else 0.0

    @property
    def are_alike(self) -> bool:
        """Whether nearly all are equal, and the others not by rounding: neither most of them nor more than chance."""
        return bool(are_alike(np.array([[self.telling, self.equal, self.near]])).all())

    @property
    def is_copy(self) -> bool:
        return self.telling >= FEWEST_TELLING and self.are_alike

    @property
    def were_computed(self) -> bool:
        """Whether there are enough that were computed on each side: fewer than half of them are equal."""
        return self.telling >= FEWEST_TELLING and self.share < _COMPUTED

    def is_copy_beside(self, others: Self) -> bool:
        """Whether a part is a copy beside others: where its tokens are not so often equal by the chance that the others
        show. Never of very few: what makes one token of a response equal, the same kernels on the same shapes, makes
        its others equal too.
        """
        if not self.is_copy or others.telling < FEWEST_TELLING:
            return False
        by_chance = (others.equal + 1) / (others.telling + 2)
        return self.share > by_chance and self.telling * _information(self.share, by_chance) >= -math.log(_BY_CHANCE)


@dataclass(frozen=True)
class ShortCopyTotals(Totals):
    """Of rows that are too short to be judged each by itself, judged together. equal: those equal throughout; rows:
    those of them with two fine tokens or more. Of rows with so many, each of other numbers than the rest: throughout,
    nearly: equal at all fine tokens, and at all but one; by_chance: how many of both are equal throughout at most, by
    chance. far, close: fine tokens of all rows that differ by more than FP32's last digits, and by these;
    equal_elsewhere: those that are equal in rows with others that are not.

    Where each token is equal with a chance of at most q, a row of n is equal throughout at most q / (1 - q) / n times
    as often as at all but one, however the chances differ between rows and tokens.
    """

    counts = ("equal", "rows", "throughout", "nearly", "far", "close", "equal_elsewhere")

    equal: float = 0.0
    rows: float = 0.0
    throughout: float = 0.0
    nearly: float = 0.0
    by_chance: float = 0.0
    far: float = 0.0
    close: float = 0.0
    equal_elsewhere: float = 0.0

    @classmethod
    def of(cls, totals: RowTotals) -> Self:
        fine, equal, close = totals.fine.T
        judged = (totals.of_all[:, 0] < FEWEST_TELLING) & (fine >= _FEWEST_FINE) & (fine - equal <= 1)
        others = np.column_stack([fine, equal, totals.sums])[judged]
        distinct = np.unique(others, axis=0)
        sizes, missed = distinct[:, 0], distinct[:, 0] - distinct[:, 1]
        elsewhere = (equal < fine) & ~(are_alike(totals.of_all) & (totals.of_all[:, 0] >= FEWEST_TELLING))
        odds = _MOST_EQUAL / (1 - _MOST_EQUAL)
        return cls(
            equal=float(totals.are_short.sum()),
            rows=float(totals.may_be_short_copies.sum()),
            throughout=float((missed == 0).sum()),
            nearly=float((missed == 1).sum()),
            by_chance=float((odds / (odds + sizes)).sum()),
            far=float((fine - equal - close).sum()),
            close=float(close.sum()),
            equal_elsewhere=float(equal[elsewhere].sum()),
        )

    @property
    def are_copies(self) -> bool:
        """Whether more of them are equal throughout than chance has it in a million, and others were computed."""
        num_rows = self.throughout + self.nearly
        others = self.far + self.close + self.equal_elsewhere
        were_computed = self.far >= max(FEWEST_TELLING, self.close) and self.equal_elsewhere <= _IN_16_BITS * others
        if not were_computed or not num_rows:
            return False
        share, by_chance = self.throughout / num_rows, self.by_chance / num_rows
        return share > by_chance and num_rows * _information(share, by_chance) >= -math.log(_BY_CHANCE)

    @property
    def copied(self) -> int:
        """Rows that are copies."""
        return int(self.rows) if self.are_copies else 0

    @property
    def undecided(self) -> int:
        """Rows that are equal throughout, and too short to tell copies from chance."""
        return int(self.equal) - self.copied


@dataclass(frozen=True)
class RowCopyTotals(Totals):
    """Of a part's rows: how many are each like a copy, their totals, and those of the other rows; of short ones that
    are equal throughout, the totals, and what tells whether they are copies.
    """

    counts = ("rows",)

    rows: float = 0.0
    alike: CopyTotals = field(default_factory=CopyTotals)
    others: CopyTotals = field(default_factory=CopyTotals)
    equal: CopyTotals = field(default_factory=CopyTotals)
    short: ShortCopyTotals = field(default_factory=ShortCopyTotals)

    @classmethod
    def of(cls, totals: RowTotals) -> Self:
        equal = totals.may_be_short_copies
        alike = are_alike(totals.of_all) & (totals.of_all[:, 0] >= FEWEST_TELLING)
        others = ~(alike | equal)
        of_alike, of_others, of_equal = (_sum(totals.of_all[chosen]) for chosen in (alike, others, equal))
        return cls(float(alike.sum()), of_alike, of_others, of_equal, ShortCopyTotals.of(totals))

    @property
    def whole(self) -> CopyTotals:
        return self.alike + self.others + self.equal

    @property
    def copied(self) -> int:
        """Rows that are copies beside the others: the mean long one is, and the short ones together."""
        if not self.rows:
            return self.short.copied
        mean = CopyTotals(*(self.alike.to_array() / self.rows).tolist())
        return self.short.copied + (int(self.rows) if mean.is_copy_beside(self.others) else 0)


@dataclass(frozen=True)
class CopiedRows:
    """What tells a row that is a copy. others: totals of the rows that are none; short: whether those are copies that
    are equal throughout and too short to be judged each by itself.
    """

    others: CopyTotals
    short: bool

    def among(self, totals: RowTotals) -> Mask:
        """Which rows are copies [N]."""
        long = [CopyTotals(*row).is_copy_beside(self.others) for row in totals.of_all.tolist()]
        return np.asarray(long, dtype=np.bool_) | (totals.may_be_short_copies & self.short)


def row_totals(first: Reals, second: Reals, rows: Ints, num_rows: int) -> RowTotals:
    """Of N rows, of two columns [T] of tokens that are of these rows [T]."""
    both = is_usable(first) & is_usable(second) & (np.fmax(first, second) <= MOST_ROUNDED_UP)
    telling = both & ((first < -CERTAIN_NATS) | (second < -CERTAIN_NATS))
    one, other = (side[telling].astype(np.float32) for side in (first, second))
    grid = _step(one, other)
    fine = grid == 0
    tells = grid <= _COARSEST * -np.expm1(np.minimum(one, other).astype(np.float64))
    one, other, fine, of_telling = one[tells], other[tells], fine[tells], rows[telling][tells]
    equal = one == other

    def count(chosen: Mask) -> Ints:
        return np.bincount(of_telling[chosen], minlength=num_rows)

    steps = np.where(equal, np.inf, _steps_apart(one, other))
    near = count(steps <= 1) - _ONE_STEP_OVER_TWO * count((steps > 1) & (steps <= 2))
    of_all = np.column_stack([np.bincount(of_telling, minlength=num_rows), count(equal), near])
    of_fine = np.column_stack([count(fine), count(fine & equal), count(fine & (steps <= 1))])
    sums = np.zeros(num_rows)
    np.add.at(sums, of_telling, one.astype(np.float64))
    return RowTotals(of_all.astype(np.float64), of_fine.astype(np.float64), sums)


def copy_totals(first: Reals, second: Reals, rows: Ints, num_rows: int) -> Floats:
    """`CopyTotals` of each row [N, 3], of two columns [T] of tokens that are of these rows [T]."""
    return row_totals(first, second, rows, num_rows).of_all


def are_alike(totals: Floats) -> Mask:
    """As `CopyTotals.are_alike`, of each row of totals [N, 3]."""
    telling, equal, near = totals.T
    are_equal = equal / np.maximum(telling, 1) >= LEAST_EQUAL
    return np.asarray(are_equal & (near <= np.minimum((telling - equal) / 2, _MOST_NEAR)))


def _sum(totals: Floats) -> CopyTotals:
    """Of rows [N, 3]."""
    return CopyTotals(*totals.sum(axis=0).tolist())


def _information(share: float, by_chance: float) -> float:
    """Nats a token by which a share is beyond chance: a binomial's tail of n is at most e to minus n times that."""
    rest = (1 - share) * math.log((1 - share) / (1 - by_chance)) if share < 1 else 0.0
    return share * math.log(share / by_chance) + rest


def _steps_apart(first: Reals, second: Reals) -> Reals:
    """How far two columns in FP32 [T] are apart [T], in steps of the coarsest of FP32's last digits, the 16-bit formats
    and the decimals that both values are written in.
    """
    apart = np.abs(first - second).astype(np.float64)
    steps = apart / _FP32_NATS
    larger = np.maximum(np.abs(first), np.abs(second))
    for bits in _MANTISSA_LEFT_OUT:
        rounded = _end_in_zeros(first, bits) & _end_in_zeros(second, bits)
        steps = np.where(rounded, np.minimum(steps, apart / (np.spacing(larger) * 2.0**bits)), steps)
    for decimals in _DECIMALS:
        rounded = _have_decimals(first, decimals) & _have_decimals(second, decimals)
        steps = np.where(rounded, np.minimum(steps, np.rint(apart * 10.0**decimals)), steps)
    return steps


def _step(first: Reals, second: Reals) -> Reals:
    """The step of the coarsest of the 16-bit formats and the decimals that both values are written in [T]; 0: of none,
    as computed log-probs are.
    """
    step = np.zeros(first.size)
    larger = np.maximum(np.abs(first), np.abs(second))
    for bits in _MANTISSA_LEFT_OUT:
        rounded = _end_in_zeros(first, bits) & _end_in_zeros(second, bits)
        step = np.where(rounded, np.maximum(step, np.spacing(larger) * 2.0**bits), step)
    for decimals in _DECIMALS:
        rounded = _have_decimals(first, decimals) & _have_decimals(second, decimals)
        step = np.where(rounded, np.maximum(step, 10.0**-decimals), step)
    return step


def _end_in_zeros(values: Reals, bits: int) -> Mask:
    return np.asarray(values.view(np.uint32) & np.uint32(2**bits - 1) == 0)


def _have_decimals(values: Reals, decimals: int) -> Mask:
    """Which were written with so many decimals, as far as FP32 tells."""
    scaled = values.astype(np.float64) * 10.0**decimals
    return np.asarray(np.abs(scaled - np.rint(scaled)) <= 1e-6 * np.abs(scaled) + 1e-9)
