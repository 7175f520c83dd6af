"""Tests whether one column of log-probs is a copy of another: equal bit for bit where two computations are not.

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
from mismatch_probe.stats.totals import AddableTotals

FEWEST_TELLING: Final = 16
"""Two computations in FP32 are all equal at so many tokens in one of ten million cases."""
CERTAIN_NATS: Final = 0.01
"""Log-probs nearer to 0 are often equal on both sides without being a copy; a difference there is no larger."""
LEAST_EQUAL: Final = 0.8
"""The share of equal tokens in a copy; computations in 16 bits, written in FP32, share 0.02, and in FP32 0.3."""

_COMPUTED: Final = 0.5
_FP32_NATS: Final = 2e-5
"""The distance of two computations in FP32."""
_MANTISSA_LEFT_OUT: Final = (16, 13)
"""Bits of FP32's mantissa that BF16 and FP16 do not have."""
_DECIMALS: Final = (1, 2, 3, 4)
_ONE_STEP_OVER_TWO: Final = 4
"""The most tokens that differ by one step for each that differs by two, where the differences are wider than a step."""
_MOST_NEAR: Final = 5
"""The most tokens beyond that which differ by one step, by chance in a copy."""
_BY_CHANCE: Final = 1e-6
_COARSEST: Final = 0.05
"""A share of 1 - p: larger steps hide the rounding to 16 bits, which is about a hundredth of 1 - p or more."""
_MOST_EQUAL: Final = 0.9
"""The largest share of equal fine tokens that were computed in 16 bits, however sure a response is of them."""
_IN_16_BITS: Final = 0.25
"""Fewer of the fine tokens are equal where both sides were computed in 16 bits and written with all digits."""
_FEWEST_FINE: Final = 2


class RowTotals(NamedTuple):
    """Totals of N rows."""

    of_all: Floats
    """The `CopyTotals` of each row [N, 3]."""
    fine: Floats
    """Counts of the telling tokens that were not rounded to few digits [N, 3]: all, the equal ones, and those of the
    others that differ only in FP32's last digits."""
    sums: Floats
    """The sum of the first side's telling log-probs, which distinguishes rows [N]."""

    @property
    def are_short(self) -> Mask:
        """The rows that are equal at all tokens and too short to be judged one by one [N]."""
        telling, equal, _ = self.of_all.T
        return np.asarray((telling > 0) & (telling < FEWEST_TELLING) & (equal == telling))

    @property
    def may_be_short_copies(self) -> Mask:
        """The rows among these that are judged together [N]."""
        return self.are_short & (self.fine[:, 0] >= _FEWEST_FINE)


@dataclass(frozen=True)
class CopyTotals(AddableTotals):
    """Counts of the telling tokens, of which one side at least is not certain."""

    counts = ("telling", "equal")
    signed_sums = ("near",)

    telling: float = 0.0
    equal: float = 0.0
    """Those that are equal bit for bit on both sides, once written in FP32."""
    near: float = 0.0
    """Those of the others that differ by rounding alone: by one step (FP32's last digits, or the 16-bit format or the
    decimals that both are written in), less four times those that differ by a second step."""

    @classmethod
    def of(cls, first: Reals, second: Reals) -> Self:
        """Count two columns of log-probs [T], where both have one."""
        [totals] = copy_totals(first, second, np.zeros(first.size, dtype=np.int64), 1)
        return cls(*totals.tolist())

    @property
    def share(self) -> float:
        """The share of the telling tokens that are equal."""
        return self.equal / self.telling if self.telling else 0.0

    @property
    def are_alike(self) -> bool:
        """Whether nearly all are equal, and no more of the others differ by rounding than chance explains."""
        return bool(are_alike(np.array([[self.telling, self.equal, self.near]])).all())

    @property
    def is_copy(self) -> bool:
        return self.telling >= FEWEST_TELLING and self.are_alike

    @property
    def were_computed(self) -> bool:
        """Whether enough tokens were computed on each side: fewer than half of them are equal."""
        return self.telling >= FEWEST_TELLING and self.share < _COMPUTED

    def is_copy_beside(self, others: Self) -> bool:
        """Whether a part is a copy, where chance, as the others show it, does not make its tokens equal so often.

        A part with very few tokens is never a copy: the same kernels on the same shapes, which make one token of a
        response equal, make its other tokens equal too.
        """
        if not self.is_copy or others.telling < FEWEST_TELLING:
            return False
        by_chance = (others.equal + 1) / (others.telling + 2)
        return self.share > by_chance and self.telling * _information_per_token(self.share, by_chance) >= -math.log(
            _BY_CHANCE
        )


@dataclass(frozen=True)
class ShortCopyTotals(AddableTotals):
    """Counts of rows that are too short to be judged one by one, and are judged together.

    Where each token is equal with a probability of at most q, a row of n tokens is equal at all of them at most
    q / (1 - q) / n times as often as at all but one, however the probabilities differ between rows and tokens.
    """

    counts = ("equal", "rows", "throughout", "nearly", "far", "close", "equal_elsewhere")

    equal: float = 0.0
    """The rows that are equal at all tokens."""
    rows: float = 0.0
    """Those of them with two fine tokens or more."""
    throughout: float = 0.0
    """The distinct rows with two fine tokens or more that are equal at all fine tokens."""
    nearly: float = 0.0
    """The distinct rows that are equal at all fine tokens but one."""
    by_chance: float = 0.0
    """The most of both that chance makes equal at all fine tokens."""
    far: float = 0.0
    """The fine tokens of all rows that differ by more than FP32's last digits."""
    close: float = 0.0
    """The fine tokens of all rows that differ by FP32's last digits."""
    equal_elsewhere: float = 0.0
    """The equal fine tokens of rows that also have different ones."""

    @classmethod
    def of(cls, totals: RowTotals) -> Self:
        fine, equal, close = totals.fine.T
        candidates = (totals.of_all[:, 0] < FEWEST_TELLING) & (fine >= _FEWEST_FINE) & (fine - equal <= 1)
        others = np.column_stack([fine, equal, totals.sums])[candidates]
        distinct = np.unique(others, axis=0)
        sizes, num_different = distinct[:, 0], distinct[:, 0] - distinct[:, 1]
        is_elsewhere = (equal < fine) & ~(are_alike(totals.of_all) & (totals.of_all[:, 0] >= FEWEST_TELLING))
        odds = _MOST_EQUAL / (1 - _MOST_EQUAL)
        return cls(
            equal=float(totals.are_short.sum()),
            rows=float(totals.may_be_short_copies.sum()),
            throughout=float((num_different == 0).sum()),
            nearly=float((num_different == 1).sum()),
            by_chance=float((odds / (odds + sizes)).sum()),
            far=float((fine - equal - close).sum()),
            close=float(close.sum()),
            equal_elsewhere=float(equal[is_elsewhere].sum()),
        )

    @property
    def are_copies(self) -> bool:
        """Whether more rows are equal than chance gives in one of a million cases, and other rows were computed."""
        num_rows = self.throughout + self.nearly
        others = self.far + self.close + self.equal_elsewhere
        were_computed = self.far >= max(FEWEST_TELLING, self.close) and self.equal_elsewhere <= _IN_16_BITS * others
        if not were_computed or not num_rows:
            return False
        share, by_chance = self.throughout / num_rows, self.by_chance / num_rows
        return share > by_chance and num_rows * _information_per_token(share, by_chance) >= -math.log(_BY_CHANCE)

    @property
    def copied(self) -> int:
        """The number of rows that are copies."""
        return int(self.rows) if self.are_copies else 0

    @property
    def undecided(self) -> int:
        """The number of equal rows that are too short to distinguish a copy from chance."""
        return int(self.equal) - self.copied


@dataclass(frozen=True)
class RowCopyTotals(AddableTotals):
    """Totals of a part's rows."""

    counts = ("rows",)

    rows: float = 0.0
    """The number of long rows that look like a copy each."""
    alike: CopyTotals = field(default_factory=CopyTotals)
    """The totals of these rows."""
    others: CopyTotals = field(default_factory=CopyTotals)
    equal: CopyTotals = field(default_factory=CopyTotals)
    """The totals of short rows that are equal at all tokens."""
    short: ShortCopyTotals = field(default_factory=ShortCopyTotals)

    @classmethod
    def of(cls, totals: RowTotals) -> Self:
        equal = totals.may_be_short_copies
        alike = are_alike(totals.of_all) & (totals.of_all[:, 0] >= FEWEST_TELLING)
        others = ~(alike | equal)
        of_alike, of_others, of_equal = (
            CopyTotals(*totals.of_all[mask].sum(axis=0).tolist()) for mask in (alike, others, equal)
        )
        return cls(float(alike.sum()), of_alike, of_others, of_equal, ShortCopyTotals.of(totals))

    @property
    def all_rows(self) -> CopyTotals:
        return self.alike + self.others + self.equal

    @property
    def copied(self) -> int:
        """The number of rows that are copies, judged by the mean long row and by the short rows together."""
        if not self.rows:
            return self.short.copied
        mean = CopyTotals(*(self.alike.to_array() / self.rows).tolist())
        return self.short.copied + (int(self.rows) if mean.is_copy_beside(self.others) else 0)


@dataclass(frozen=True)
class CopiedRows:
    """The facts that decide whether a row is a copy."""

    others: CopyTotals
    """The totals of the rows that are not copies."""
    short: bool
    """Whether rows are copies that are equal at all tokens and too short to be judged one by one."""

    def among(self, totals: RowTotals) -> Mask:
        """The mask of the rows that are copies [N]."""
        long = [CopyTotals(*row).is_copy_beside(self.others) for row in totals.of_all.tolist()]
        return np.asarray(long, dtype=np.bool_) | (totals.may_be_short_copies & self.short)


def row_totals(first: Reals, second: Reals, rows: Ints, num_rows: int) -> RowTotals:
    """The totals of N rows, from two columns [T] and the row of each token [T]."""
    both = is_usable(first) & is_usable(second) & (np.fmax(first, second) <= MOST_ROUNDED_UP)
    telling = both & ((first < -CERTAIN_NATS) | (second < -CERTAIN_NATS))
    first_logprobs, second_logprobs = (side[telling].astype(np.float32) for side in (first, second))
    grid = _coarsest_step(first_logprobs, second_logprobs)
    fine = grid == 0
    tells = grid <= _COARSEST * -np.expm1(np.minimum(first_logprobs, second_logprobs).astype(np.float64))
    first_logprobs, second_logprobs, fine, of_telling = (
        first_logprobs[tells],
        second_logprobs[tells],
        fine[tells],
        rows[telling][tells],
    )
    equal = first_logprobs == second_logprobs

    def count(mask: Mask) -> Ints:
        return np.bincount(of_telling[mask], minlength=num_rows)

    steps = np.where(equal, np.inf, _distance_in_steps(first_logprobs, second_logprobs))
    num_near = count(steps <= 1) - _ONE_STEP_OVER_TWO * count((steps > 1) & (steps <= 2))
    of_all = np.column_stack([np.bincount(of_telling, minlength=num_rows), count(equal), num_near])
    of_fine = np.column_stack([count(fine), count(fine & equal), count(fine & (steps <= 1))])
    sums = np.zeros(num_rows)
    np.add.at(sums, of_telling, first_logprobs.astype(np.float64))
    return RowTotals(of_all.astype(np.float64), of_fine.astype(np.float64), sums)


def copy_totals(first: Reals, second: Reals, rows: Ints, num_rows: int) -> Floats:
    """The `CopyTotals` of each row [N, 3], from two columns [T] and the row of each token [T]."""
    return row_totals(first, second, rows, num_rows).of_all


def are_alike(totals: Floats) -> Mask:
    """`CopyTotals.are_alike` for each row of totals [N, 3]."""
    telling, equal, num_near = totals.T
    are_equal = equal / np.maximum(telling, 1) >= LEAST_EQUAL
    return np.asarray(are_equal & (num_near <= np.minimum((telling - equal) / 2, _MOST_NEAR)))


def _information_per_token(share: float, by_chance: float) -> float:
    """The nats by which a share is beyond chance: a binomial tail of n tokens is at most e^(-n times these)."""
    rest = (1 - share) * math.log((1 - share) / (1 - by_chance)) if share < 1 else 0.0
    return share * math.log(share / by_chance) + rest


def _distance_in_steps(first: Reals, second: Reals) -> Reals:
    """The distance of two columns in FP32 [T], in steps of the coarsest format that both values are written in.

    The formats are FP32's last digits, the 16-bit formats and decimals.
    """
    distance = np.abs(first - second).astype(np.float64)
    steps = distance / _FP32_NATS
    larger = np.maximum(np.abs(first), np.abs(second))
    for bits in _MANTISSA_LEFT_OUT:
        are_rounded = _end_in_zeros(first, bits) & _end_in_zeros(second, bits)
        steps = np.where(are_rounded, np.minimum(steps, distance / (np.spacing(larger) * 2.0**bits)), steps)
    for decimals in _DECIMALS:
        are_rounded = _have_decimals(first, decimals) & _have_decimals(second, decimals)
        steps = np.where(are_rounded, np.minimum(steps, np.rint(distance * 10.0**decimals)), steps)
    return steps


def _coarsest_step(first: Reals, second: Reals) -> Reals:
    """The step of the coarsest 16-bit format or decimals that both values are written in [T].

    It is 0 where there is none, as for computed log-probs.
    """
    step = np.zeros(first.size)
    larger = np.maximum(np.abs(first), np.abs(second))
    for bits in _MANTISSA_LEFT_OUT:
        are_rounded = _end_in_zeros(first, bits) & _end_in_zeros(second, bits)
        step = np.where(are_rounded, np.maximum(step, np.spacing(larger) * 2.0**bits), step)
    for decimals in _DECIMALS:
        are_rounded = _have_decimals(first, decimals) & _have_decimals(second, decimals)
        step = np.where(are_rounded, np.maximum(step, 10.0**-decimals), step)
    return step


def _end_in_zeros(values: Reals, bits: int) -> Mask:
    return np.asarray(values.view(np.uint32) & np.uint32(2**bits - 1) == 0)


def _have_decimals(values: Reals, decimals: int) -> Mask:
    """The mask of the values that were written with so many decimals, as far as FP32 shows."""
    multiples = values.astype(np.float64) * 10.0**decimals
    return np.asarray(np.abs(multiples - np.rint(multiples)) <= 1e-6 * np.abs(multiples) + 1e-9)
