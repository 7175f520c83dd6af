"""Exact zeros of a log-prob, and the share of a sample that has no log-prob.

An engine's log-prob is 0 where a token is alone in its nucleus (top-p) or where a log-softmax in 16 bits rounds to 0.
The other side is then as sure of it as of tokens that the engine is nearly sure of: nearly always where the sides
agree, less often where the weights differ. Zeros that stand for missing numbers fill a response or a stretch of it,
whatever log-probs the other side has there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from scipy.special import gammaln

from mismatch_probe.stats.sequences import Floats, Ints, Mask, Reals, Sequences, is_usable
from mismatch_probe.stats.totals import AddableTotals

SURELY_BELOW_ZERO: Final = -1.0
"""A token with less on one side is certain on neither: it does not round to 0, nor is it alone in a nucleus of 0.4."""
NEARLY_SURE: Final = -0.5
"""A side is nearly sure of a token with a larger log-prob."""
FEWEST_REFUTED: Final = 3
REFUTED_SHARE: Final = 0.005
"""A model that is very sure gives this share of its tokens a probability below e^-1."""
SHORTEST_RUN: Final = 16
"""A run of so many zeros is judged by itself."""
_DEVIATIONS: Final = 3.0
"""The standard deviations by which a share of zeros must exceed that of nearly sure tokens."""


@dataclass(frozen=True)
class NearlySure(AddableTotals):
    """The number of tokens that a side is nearly sure of, and of those at which the other side is a nat below."""

    tokens: float = 0.0
    below: float = 0.0

    @classmethod
    def of(cls, values: Reals, others: Reals) -> Self:
        """Count the tokens [T]; a missing log-prob is NaN."""
        is_nearly_sure = (values < 0) & (values > NEARLY_SURE) & is_usable(others)
        return cls(
            tokens=float(is_nearly_sure.sum()),
            below=float((is_nearly_sure & (others < values + SURELY_BELOW_ZERO)).sum()),
        )

    @property
    def share(self) -> float:
        """The share at which the other side is a nat below; 0 where fewer than 3 are."""
        return self.below / self.tokens if self.below >= FEWEST_REFUTED else 0.0


@dataclass(frozen=True)
class ZeroCounts(AddableTotals):
    """The numbers of zeros, of zeros with a log-prob on the other side, and of those it is not sure of."""

    zeros: float = 0.0
    compared: float = 0.0
    refuted: float = 0.0

    @classmethod
    def of(cls, zeros: Mask, others: Reals) -> Self:
        """Count the zeros [T]; `others` are the other side's log-probs [T]."""
        return cls(
            zeros=float(zeros.sum()),
            compared=float((zeros & is_usable(others)).sum()),
            refuted=float(refuted(zeros, others).sum()),
        )

    def stand_for_missing(self, nearly_sure: NearlySure, *, throughout: bool = False) -> bool:
        """Whether the zeros stand for missing numbers.

        The other side must refute 3 or more (1 where there are only zeros: `throughout`), at least 1 in 200, and more
        often than it is a nat below at nearly sure tokens.
        """
        usual = nearly_sure.share * self.compared
        by_chance = usual + _DEVIATIONS * (usual * (1 - nearly_sure.share)) ** 0.5
        fewest = 1 if throughout else FEWEST_REFUTED
        return self.refuted >= max(fewest, REFUTED_SHARE * self.compared) and self.refuted > by_chance


def doubtful_stretches(values: Reals, others: Reals) -> list[Mask]:
    """The masks [T] of a response's zeros that may stand for missing numbers together.

    Each is a run of 16 or more, or all other zeros, with 3 or more that the other side refutes.
    """
    zeros = np.asarray(values == 0)
    doubtful = refuted(zeros, others)
    if doubtful.sum() < FEWEST_REFUTED:
        return []
    run_of = _run_numbers(zeros)
    sizes = np.bincount(run_of)
    run_of = np.where(sizes[run_of] >= SHORTEST_RUN, run_of, 0)
    stretches = (np.asarray(zeros & (run_of == run)) for run in np.unique(run_of[doubtful]))
    return [stretch for stretch in stretches if doubtful[stretch].sum() >= FEWEST_REFUTED]


def filled_with_zeros(values: Reals, others: Reals, nearly_sure: NearlySure) -> Mask:
    """The mask [T] of a response's zeros that stand for missing numbers, by stretches. nearly_sure: of the log."""
    is_filled: Mask = np.zeros(values.shape, dtype=np.bool_)
    for stretch in doubtful_stretches(values, others):
        if ZeroCounts.of(stretch, others).stand_for_missing(nearly_sure):
            is_filled |= stretch
    return is_filled


def zeros_for_missing(values: Reals, others: Reals, offsets: Ints) -> Mask:
    """The mask [T] of the zeros of several responses that stand for missing numbers.

    These are the zeros that fill responses, and all others where the other side refutes these too. offsets: [N+1], as
    of `Sequences`.
    """
    zeros = np.asarray(values == 0)
    doubtful = refuted(zeros, others)
    is_filled: Mask = np.zeros(zeros.shape, dtype=np.bool_)
    if not doubtful.any():
        return is_filled
    nearly_sure = NearlySure.of(values, others)
    if zeros.all():
        return zeros if ZeroCounts.of(zeros, others).stand_for_missing(nearly_sure, throughout=True) else is_filled
    counts = np.add.reduceat(doubtful, offsets[:-1], dtype=np.int64)
    for row in np.flatnonzero(counts >= FEWEST_REFUTED):
        of_row = slice(offsets[row], offsets[row + 1])
        is_filled[of_row] = filled_with_zeros(values[of_row], others[of_row], nearly_sure)
    if ZeroCounts.of(zeros & ~is_filled, others).stand_for_missing(nearly_sure):
        return zeros
    return is_filled


def sides_without_zeros(first: Floats, second: Floats, offsets: Ints) -> tuple[Floats, Floats]:
    """Two sides [T] with NaN for the zeros that stand for missing numbers (`zeros_for_missing`)."""
    sides = (first, second), (second, first)
    of_first, of_second = (
        np.where(absent, np.nan, values) if (absent := zeros_for_missing(values, others, offsets)).any() else values
        for values, others in sides
    )
    return of_first, of_second


def refuted(zeros: Mask, others: Reals) -> Mask:
    """The mask [T] of zeros at tokens that the other side is not sure of."""
    return np.asarray(zeros & is_usable(others) & (others < SURELY_BELOW_ZERO))


def _run_numbers(zeros: Mask) -> Ints:
    """The number of each zero's run, from 1 [T]; 0 for other tokens."""
    begins = zeros & ~np.concatenate([[False], zeros[:-1]])
    return np.asarray(np.where(zeros, np.cumsum(begins), 0), dtype=np.int64)


MOST_LEFT_OUT_OF_A_PASS: Final = 0.05
"""Deviations grow about as surprisal does, so that tokens with a twentieth of it, left out, hide about a twentieth of
a mean: less than the excess of 1.15 times that a gate is made to see.
"""


@dataclass(frozen=True)
class LeftOutTotals(AddableTotals):
    """Counts of tokens and of left-out tokens, and the same of their surprisal (nats): -log p by pi, else by mu.

    of_neither: the number of tokens without a log-prob on either side. They may be the rarest of all, so each counts as
    the most surprising token with a log-prob.
    """

    counts = ("tokens", "out", "of_neither")
    signed_sums = ("surprisal", "surprisal_out")

    tokens: float = 0.0
    out: float = 0.0
    surprisal: float = 0.0
    surprisal_out: float = 0.0
    of_neither: float = 0.0
    highest_surprisal: float = 0.0

    @classmethod
    def of(cls, log_pi: Reals, log_mu: Reals, is_kept: Mask) -> Self:
        """The totals of tokens [T]; a missing log-prob is NaN."""
        surprisal = -np.where(np.isnan(log_pi), log_mu, log_pi)
        return cls(
            tokens=float(is_kept.size),
            out=float((~is_kept).sum()),
            surprisal=float(np.nansum(surprisal)),
            surprisal_out=float(np.nansum(surprisal[~is_kept])),
            of_neither=float(np.isnan(surprisal).sum()),
            highest_surprisal=float(np.nanmax(surprisal, initial=0.0)),
        )

    @property
    def of_surprisal(self) -> float:
        """The share of the surprisal that is left out, among tokens with a log-prob on a side."""
        return _bounded_share(self.surprisal_out, self.surprisal)

    @property
    def of_surprisal_at_most(self) -> float:
        """The largest share of the surprisal, with the tokens that have no log-prob on any side."""
        of_neither = self.of_neither * self.highest_surprisal
        return _bounded_share(self.surprisal_out + of_neither, self.surprisal + of_neither)

    @property
    def share(self) -> float:
        """The share of the tokens, or of their surprisal at most where that is larger."""
        return max(self.out / self.tokens, self.of_surprisal_at_most) if self.tokens else 0.0

    @property
    def are_few(self) -> bool:
        """Whether the tokens that are left out are too few to hide a visible deviation."""
        return self.share <= MOST_LEFT_OUT_OF_A_PASS


@dataclass(frozen=True)
class Gaps:
    """All sampled tokens [T] of a log's responses, also those without a log-prob, which is NaN."""

    sequences: Sequences
    log_pi: Reals
    log_mu: Reals
    kept: Mask
    """The tokens that are measured."""

    def share_of(self, mask: Mask) -> float:
        """The share of the chosen tokens [T] that is left out, or of their surprisal at most where that is larger."""
        return LeftOutTotals.of(self.log_pi[mask], self.log_mu[mask], self.kept[mask]).share


def _bounded_share(part: float, total: float) -> float:
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0


LEVELS_OF_SURENESS: Final = 24
_FEWEST_AS_SURE: Final = 20
_MOST_IDS: Final = 4096


def sureness_levels(pi: Floats) -> Ints:
    """The level of each log-prob of the trainer, two to a factor of 10: 0 is from 1e-12 up, 23 from -1 down."""
    levels = np.floor(2 * np.log10(np.clip(-np.nan_to_num(pi, nan=-1.0), 1e-12, 1.0)))
    return np.asarray(levels, dtype=np.int64).clip(1 - LEVELS_OF_SURENESS, 0) + LEVELS_OF_SURENESS - 1


@dataclass
class ZerosAtEdge:
    """Tokens at one edge of masks at which the engine has exactly 0, as is written for what was not sampled."""

    places: int = 0
    """All tokens at the edge, of responses with columns of both sides."""
    zeros: int = 0
    by_sureness: Ints = field(default_factory=lambda: np.zeros(LEVELS_OF_SURENESS, dtype=np.int64))
    """Zeros at each level of the trainer's sureness."""
    surest: dict[int, int] = field(default_factory=dict)
    """Of each token id that has a zero, the surest level."""

    def add(self, ids: Ints, zero: Mask, levels: Ints) -> None:
        self.places += ids.size
        self.zeros += int(zero.sum())
        self.by_sureness = self.by_sureness + np.bincount(levels[zero], minlength=LEVELS_OF_SURENESS)
        self._join(zip(ids[zero].tolist(), levels[zero].tolist(), strict=True))

    def _join(self, items: Iterable[tuple[int, int]]) -> None:
        for token, level in items:
            if token in self.surest or len(self.surest) < _MOST_IDS:
                self.surest[token] = min(level, self.surest.get(token, level))

    def __iadd__(self, other: Self) -> Self:
        self.places += other.places
        self.zeros += other.zeros
        self.by_sureness = self.by_sureness + other.by_sureness
        self._join(other.surest.items())
        return self

    def nats(self, inner: Ints) -> tuple[float, float]:
        """How improbable it is that so many zeros stand at the edge by chance, as -log p: with each token id counted
        once, and with each place. inner: tokens under the mask elsewhere [level, is zero], as sure to the trainer.
        """
        of_ids = np.bincount(list(self.surest.values()), minlength=LEVELS_OF_SURENESS)
        return _nats_of_margins(of_ids, inner), _nats_of_margins(self.by_sureness, inner)


def _nats_of_margins(zeros: Ints, inner: Ints) -> float:
    """-log of the probability that a random choice of the zeros among the tokens of a level puts one on each token of
    the edge (the extreme of Fisher's exact test), summed over levels at which enough other tokens are. What is surely
    below 0 refutes a 0 by itself, and is not counted here.
    """
    others, zeros_of_others = inner.sum(axis=1), inner[:, 1]
    nats = _log_choices(others + zeros, zeros_of_others + zeros) - _log_choices(others, zeros_of_others)
    return float(nats[:-1][others[:-1] >= _FEWEST_AS_SURE].sum())


def _log_choices(total: Ints, part: Ints) -> Floats:
    """The logarithm of the binomial coefficient."""
    return np.asarray(gammaln(total + 1.0) - gammaln(part + 1.0) - gammaln(total - part + 1.0))
