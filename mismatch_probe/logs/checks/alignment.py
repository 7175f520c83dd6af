"""Whether the two sides are about the same tokens: their correlation at shifts of -1, 0 and +1 tokens."""

from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.logs.checks.columns import Block
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.stats.sequences import MOST_ROUNDED_UP, is_usable

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

    def add(self, block: Block) -> None:
        mu, pi, rows = block.log_mu, block.column("log_pi"), block.rows
        counts_mu, counts_pi = block.sampled & _can_be(mu), block.sampled & _can_be(pi)
        is_told = np.ones(len(block.responses), dtype=np.bool_)
        for counts, side in ((counts_mu, mu), (counts_pi, pi)):  # zeros stand for what was not recorded
            is_told &= np.bincount(rows[counts & (side != 0)], minlength=is_told.size) > 0
        counts_mu &= is_told[rows]
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
        """By how many tokens the trainer's column is behind the sampler's; 0 where it is not, or cannot be told."""
        by_shift = self.correlations
        if by_shift is None:
            return 0
        best = max(by_shift, key=lambda shift: by_shift[shift])
        return best if by_shift[best] > _BELONGS and by_shift[best] > by_shift[0] + _CLEARLY else 0

    @property
    def unrelated(self) -> bool:
        """Whether the two sides do not go together at any shift."""
        by_shift = self.correlations
        return by_shift is not None and max(by_shift.values()) < _BELONGS


def _can_be(log_probs: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether each is a log-prob; squares of what is far above 0 have no sum."""
    return is_usable(log_probs) & (log_probs <= MOST_ROUNDED_UP)
