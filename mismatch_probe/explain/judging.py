"""How well a column of log-probs is explained, in units of what rounding gives, and which of two accounts is better.

The loss of a token is the negative log-likelihood of Student's t with four degrees of freedom, whose scale is the
rounding floor at the predicted log-prob: about the square of a small residual, and little more for a huge one than for
a large one, so that no single token decides. Tokens of one response are not independent, so two accounts are compared
by the sums of whole responses.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mismatch_probe.explain.tokens import Bools, Floats, Ints
from mismatch_probe.stats.rounding_floor import Floor, trimmed_mean

_FREEDOM: Final = 4.0
_LEAST_BLOCKS: Final = 8
_FARTHEST_NATS: Final = 100.0


@dataclass(frozen=True)
class Account:
    """What a hypothesis says of every token: its log-prob [T], NaN where it says nothing, and how well it is known [T].

    Both in nats; `unit` is the rounding floor.
    """

    predicted: Floats
    unit: Floats


@dataclass(frozen=True)
class Judge:
    """One side's column [T] (nats), what was rounded off as it was written, each token's response, and what counts."""

    column: Floats
    resolution: Floats
    rows: Ints
    counted: Bools

    def account(self, predicted: Floats, floor: Floor, unit_times: float = 1.0) -> Account:
        """The prediction with the floor at it, times what a sharper distribution makes of it."""
        return Account(predicted, np.hypot(floor.at(predicted) * unit_times, self.resolution))

    def residual(self, account: Account) -> Floats:
        """In nats [T], NaN where nothing counts or nothing is predicted."""
        with np.errstate(invalid="ignore"):
            nats = np.clip(self.column - account.predicted, -_FARTHEST_NATS, _FARTHEST_NATS)
        return np.asarray(np.where(self.counted, nats, np.nan))

    def loss(self, account: Account) -> Floats:
        """Of each token [T], NaN as `residual`."""
        squares = (self.residual(account) / account.unit) ** 2
        return np.asarray((_FREEDOM + 1) / 2 * np.log1p(squares / _FREEDOM) + np.log(account.unit))

    def floors(self, account: Account) -> float:
        """Root mean square of the residuals in units, without the largest hundredth."""
        units = self.residual(account) / account.unit
        return float(np.sqrt(trimmed_mean(units[np.isfinite(units)] ** 2)))

    def nats(self, account: Account) -> float:
        """Root mean square of the residuals in nats."""
        residual = self.residual(account)
        return float(np.sqrt(np.mean(residual[np.isfinite(residual)] ** 2)))

    def explained(self, account: Account, null: Account) -> float:
        """Share of the null's square (nats) that `account` takes away, on tokens that both speak of; -1 at worst."""
        ours, theirs = self.residual(account), self.residual(null)
        both = np.isfinite(ours) & np.isfinite(theirs)
        before = trimmed_mean(theirs[both] ** 2)
        return max(-1.0, 1 - trimmed_mean(ours[both] ** 2) / before) if before > 0 else 0.0

    def same(self, account: Account, other: Account) -> bool:
        """Whether both say the same of every token."""
        ours, theirs = (np.stack([side.predicted, side.unit]) for side in (account, other))
        return np.array_equal(ours, theirs, equal_nan=True)

    def standard_scores(self, better: Account, worse: Account) -> float:
        """By how many standard errors `better` has the smaller loss; 0 where both say the same.

        Responses of which both say the same are left out; of few that are left, pieces are compared. Of the sum of
        their gains or of the signed ranks [Wilcoxon 1945], whichever tells more: one response with a large gain makes
        the sum's error as large as itself.
        """
        gains = self.loss(worse) - self.loss(better)
        differs = np.isfinite(gains) & (gains != 0)
        if not differs.any():
            return 0.0
        _, blocks = np.unique(self.rows[differs], return_inverse=True)
        if blocks.max() + 1 < _LEAST_BLOCKS:
            blocks = np.arange(differs.sum()) * _LEAST_BLOCKS // int(differs.sum())
        sums = np.bincount(blocks, weights=gains[differs]).astype(np.float64)
        spread = float(np.sqrt(np.sum((sums - sums.mean()) ** 2) * len(sums) / max(len(sums) - 1, 1)))
        total = float(sums.sum())
        of_sum = total / spread if spread > 0 else float(np.sign(total))
        return max(of_sum, _of_ranks(sums)) if total > 0 else of_sum


def _of_ranks(gains: Floats) -> float:
    """Standard score of the sum of the signed ranks of some gains."""
    _, places, counts = np.unique(np.abs(gains), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float(np.sum(np.sign(gains) * ranks) / np.sqrt(np.sum(ranks**2)))
