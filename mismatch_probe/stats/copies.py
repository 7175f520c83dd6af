"""Whether one column of log-probs is a copy of another: equal bit for bit where two computations are not.

Two computations in FP32 are equal at most tokens that they are nearly sure of (19 of 20 between -0.001 and -0.01) and
at a few others, and differ elsewhere by their last digits. Columns that were rounded, to 16 bits or to decimals, are
equal wherever both sides round alike, and differ elsewhere by one step, and hardly ever by two, whatever a few tokens
differ by beyond that. A copy is equal at nearly all tokens, and where something else was written over it, as at the
first token of each response, it differs by any amount: by two steps nearly as often as by one.
"""

import math
from dataclasses import dataclass, field
from typing import Final, Self

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
class RowCopyTotals(Totals):
    """Of a part's rows: how many are each like a copy, their totals, and those of the other rows."""

    counts = ("rows",)

    rows: float = 0.0
    alike: CopyTotals = field(default_factory=CopyTotals)
    others: CopyTotals = field(default_factory=CopyTotals)

    @classmethod
    def of(cls, totals: Floats) -> Self:
        """Of `copy_totals` [N, 3]."""
        alike = are_alike(totals) & (totals[:, 0] >= FEWEST_TELLING)
        sides = (CopyTotals(*totals[chosen].sum(axis=0).tolist()) for chosen in (alike, ~alike))
        return cls(float(alike.sum()), *sides)

    @property
    def whole(self) -> CopyTotals:
        return self.alike + self.others

    @property
    def copied(self) -> int:
        """Rows that are copies beside the others: the mean one of them is."""
        if not self.rows:
            return 0
        mean = CopyTotals(*(self.alike.to_array() / self.rows).tolist())
        return int(self.rows) if mean.is_copy_beside(self.others) else 0


def copied_rows(first: Reals, second: Reals, rows: Ints, num_rows: int) -> Mask:
    """Which rows of two columns [T] are copies beside the others [N]; none where all are. rows: of each token [T]."""
    totals = copy_totals(first, second, rows, num_rows)
    others = RowCopyTotals.of(totals).others
    return np.array([CopyTotals(*row).is_copy_beside(others) for row in totals.tolist()], dtype=np.bool_)


def copy_totals(first: Reals, second: Reals, rows: Ints, num_rows: int) -> Floats:
    """`CopyTotals` of each row [N, 3], of two columns [T] of tokens that are of these rows [T]."""
    both = is_usable(first) & is_usable(second) & (np.fmax(first, second) <= MOST_ROUNDED_UP)
    telling = both & ((first < -CERTAIN_NATS) | (second < -CERTAIN_NATS))
    one, other = (side[telling].astype(np.float32) for side in (first, second))
    equal, of_telling = one == other, rows[telling]
    num_telling, num_equal = (np.bincount(of, minlength=num_rows) for of in (of_telling, of_telling[equal]))
    steps, of_others = _steps_apart(one[~equal], other[~equal]), of_telling[~equal]
    one_step, two_steps = (steps <= 1), (steps > 1) & (steps <= 2)
    num_one, num_two = (np.bincount(of_others[chosen], minlength=num_rows) for chosen in (one_step, two_steps))
    near = num_one - _ONE_STEP_OVER_TWO * num_two
    return np.column_stack([num_telling, num_equal, near]).astype(np.float64)


def are_alike(totals: Floats) -> Mask:
    """As `CopyTotals.are_alike`, of each row of totals [N, 3]."""
    telling, equal, near = totals.T
    are_equal = equal / np.maximum(telling, 1) >= LEAST_EQUAL
    return np.asarray(are_equal & (near <= np.minimum((telling - equal) / 2, _MOST_NEAR)))


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


def _end_in_zeros(values: Reals, bits: int) -> Mask:
    return np.asarray(values.view(np.uint32) & np.uint32(2**bits - 1) == 0)


def _have_decimals(values: Reals, decimals: int) -> Mask:
    """Which were written with so many decimals, as far as FP32 tells."""
    scaled = values.astype(np.float64) * 10.0**decimals
    return np.asarray(np.abs(scaled - np.rint(scaled)) <= 1e-6 * np.abs(scaled) + 1e-9)
