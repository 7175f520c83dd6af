"""How much of a sample its tokens without a log-prob are."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from mismatch_probe.stats.sequences import Mask, Reals, Sequences
from mismatch_probe.stats.totals import Totals

MOST_LEFT_OUT_OF_A_PASS: Final = 0.05
"""Deviations grow about as surprisal does, so that tokens with a twentieth of it, left out, hide about a twentieth of
a mean: less than the excess of 1.15 times that a gate is made to see.
"""


@dataclass(frozen=True)
class LeftOutTotals(Totals):
    """Of tokens: how many there are and how many are left out, and the same of their surprisal [nats]: -log p by pi
    where pi has a log-prob, else by mu.

    of_neither: how many have no log-prob on either side. They may be the rarest of all, so that each counts as the most
    surprising one that a side has.
    """

    counts = ("tokens", "out", "of_neither")
    signed = ("surprisal", "surprisal_out")

    tokens: float = 0.0
    out: float = 0.0
    surprisal: float = 0.0
    surprisal_out: float = 0.0
    of_neither: float = 0.0
    highest_surprisal: float = 0.0

    @classmethod
    def of(cls, log_pi: Reals, log_mu: Reals, kept: Mask) -> Self:
        """Of tokens [T] with NaN for a log-prob that is missing."""
        surprisal = -np.where(np.isnan(log_pi), log_mu, log_pi)
        return cls(
            tokens=float(kept.size),
            out=float((~kept).sum()),
            surprisal=float(np.nansum(surprisal)),
            surprisal_out=float(np.nansum(surprisal[~kept])),
            of_neither=float(np.isnan(surprisal).sum()),
            highest_surprisal=float(np.nanmax(surprisal, initial=0.0)),
        )

    @property
    def of_surprisal(self) -> float:
        """Share of the surprisal that is left out, of the tokens that have one."""
        return _share(self.surprisal_out, self.surprisal)

    @property
    def of_surprisal_at_most(self) -> float:
        """The same with the tokens that no side has."""
        of_neither = self.of_neither * self.highest_surprisal
        return _share(self.surprisal_out + of_neither, self.surprisal + of_neither)

    @property
    def share(self) -> float:
        """Of the tokens, or of their surprisal at most where that is more."""
        return max(self.out / self.tokens, self.of_surprisal_at_most) if self.tokens else 0.0

    @property
    def are_few(self) -> bool:
        """Whether what is left out cannot hide a deviation that would be seen."""
        return self.share <= MOST_LEFT_OUT_OF_A_PASS


@dataclass(frozen=True)
class Gaps:
    """All sampled tokens [T] of a log's responses, those without a log-prob too.

    log_pi, log_mu: NaN where there is none. kept: the tokens that are measured.
    """

    sequences: Sequences
    log_pi: Reals
    log_mu: Reals
    kept: Mask

    def share_of(self, chosen: Mask) -> float:
        """Of the chosen tokens [T], or of their surprisal at most where that is more, what is left out."""
        return LeftOutTotals.of(self.log_pi[chosen], self.log_mu[chosen], self.kept[chosen]).share


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
