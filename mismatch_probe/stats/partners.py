"""Whether responses carry the scores of other responses: an exchange is all or nothing per response, and undoes."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints, Reals, Sequences, TokenPair
from mismatch_probe.stats.totals import Totals

MOST_EXAMINED: Final = 64
"""Responses whose partner is looked for, and the first tokens compared; enough to tell and quick for any batch."""
RESTORED_RMS: Final = 0.2
"""Largest rms deviation from the true partner, of what it was before; and from which on a response is off, of the
largest of all."""
LEAST_RESTORED: Final = 0.8
"""Partners that must be found, each another one, for every response that is examined."""
_LEAST_OVERLAP: Final = 8


@dataclass(frozen=True)
class PartnerTotals(Totals):
    """off: responses that disagree; examined: those of them whose partner was looked for; partners: other responses
    that were found to be the partner of one.
    """

    counts = ("off", "examined", "partners")

    off: float = 0.0
    examined: float = 0.0
    partners: float = 0.0

    @classmethod
    def of(cls, pair: TokenPair, least: float, most: float | None = None) -> Self:
        """least: rms of d of a response that may be off, nats. most: largest rms deviation from a true partner, nats;
        unless it is known, by `RESTORED_RMS`.
        """
        own = rms_by_sequence(pair)
        off = np.flatnonzero(own > max(least, RESTORED_RMS * own.max()))
        if off.size < 2:
            return cls(off=float(off.size))
        examined = off[np.linspace(0, off.size - 1, min(off.size, MOST_EXAMINED)).astype(np.int64)]
        long = pair.sequences.lengths >= _LEAST_OVERLAP
        candidates = off[long[off]]
        if candidates.size < 2:
            return cls(off=float(off.size), examined=float(examined.size))
        log_pi, log_mu = (_heads(leg, pair.sequences) for leg in (pair.log_pi, pair.log_mu))
        most = RESTORED_RMS * float(np.median(own[off])) if most is None else most
        partners = {_partner(row, candidates, log_pi, log_mu, most) for row in examined[long[examined]]} - {None}
        return cls(float(off.size), float(examined.size), float(len(partners)))

    @property
    def share(self) -> float:
        """Of the responses examined, those that fit another one."""
        return self.partners / self.examined if self.examined else 0.0

    @property
    def are_exchanged(self) -> bool:
        return self.examined > 0 and self.share >= LEAST_RESTORED


def rms_by_sequence(pair: TokenPair) -> Floats:
    """Root mean square of d in each response [N]."""
    return np.asarray(np.sqrt(pair.sequences.sum_by_sequence(pair.diff**2) / pair.sequences.lengths))


def _heads(leg: Reals, sequences: Sequences) -> Floats:
    """The first tokens of each response, NaN beyond its end [N, C]."""
    positions = sequences.positions
    heads = np.full((sequences.num_sequences, min(MOST_EXAMINED, int(positions.max()) + 1)), np.nan)
    inside = np.flatnonzero(positions < MOST_EXAMINED)
    rows: Ints = np.repeat(np.arange(sequences.num_sequences), sequences.lengths)
    heads[rows[inside], positions[inside]] = leg[inside]
    return heads


def _partner(row: int, candidates: Ints, log_pi: Floats, log_mu: Floats, most: float) -> int | None:
    """The response whose log pi fits this one's log mu best, if to within `most` nats rms."""
    others = candidates[candidates != row]
    squares = (log_pi[others] - log_mu[row]) ** 2
    overlap = np.isfinite(squares).sum(axis=1)
    mean = np.where(overlap >= _LEAST_OVERLAP, np.nansum(squares, axis=1) / np.maximum(overlap, 1), np.inf)
    best = int(mean.argmin())
    return int(others[best]) if mean[best] <= most**2 else None
