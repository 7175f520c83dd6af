"""Tests whether log-probs or entropies are in nats, from moments that the parts of a log add up.

One side in another base is proportional to the other side through 0. Neither a temperature (log mu = b log pi - log Z,
with a Z of the context) nor a cut vocabulary (log mu = log pi - log K) makes it so. Where both sides or the entropies
are in another base, -log p is one multiple of the entropy for sure and for unsure tokens. Tokens drawn at another
temperature have other surprisals too, but not by one factor for both.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from mismatch_probe.stats.sequences import Floats, Reals

LARGEST_VOCABULARY: Final = 2**20
"""Larger than the vocabulary of any language model."""
_FEWEST_TOKENS: Final = 1000
_ENTROPY_DIFFERS: Final = 5.0
"""Standard errors of a mean."""


def moments(terms: Floats) -> Floats:
    """The number, sum and sum of squares of the terms [3], which parts add up."""
    return np.array([terms.size, terms.sum(), terms @ terms])


def most_entropy(vocabulary_size: int | None) -> float:
    """The entropy of a uniform distribution over a vocabulary, nats; over the largest one where the size is None."""
    return math.log(vocabulary_size or LARGEST_VOCABULARY)


def are_no_samples(surprisal: Floats, vocabulary_size: int | None) -> bool:
    """Whether sampled tokens are less likely than under the uniform distribution, by the `moments` of their -log p.

    The mean of -log p is an entropy in expectation.
    """
    if surprisal[0] < _FEWEST_TOKENS:
        return False
    mean, error = mean_and_error(surprisal)
    return mean - _ENTROPY_DIFFERS * error > most_entropy(vocabulary_size)


def mean_and_error(sums: Floats) -> tuple[float, float]:
    """The mean and its standard error, from `moments`."""
    count, total, squares = sums.tolist()
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean * mean) / count)


def errors_from_0(sums: Floats) -> float:
    """The distance of a mean from 0 in standard errors, from its `moments`."""
    mean, error = mean_and_error(sums)
    return abs(mean) / error if error > 0 else math.inf


def entropies_differ(nats: Floats) -> bool:
    """Whether the mean of log p + H differs from 0, by its `moments`."""
    return errors_from_0(nats) > _DIFFERS


BASES: Final = (2, 10)
ScoreColumn = Literal["log_pi", "log_mu", "both", "entropy"]

_FEWEST_FOR_SIDES: Final = 64
FEWEST_FOR_ENTROPIES: Final = 1000
_FEWEST_OF_A_HALF: Final = 50
_ENOUGH: Final = 4000
"""With so many tokens some of them show whether both sides are in another base."""

_LEAST_NATS: Final = 0.1
"""Below this a log-prob is as small as its rounding."""

_NEAR: Final = 0.15
"""Log of a ratio: noise of 0.1 nats a token moves a fifth of the ratios further than this."""

_NEAR_SHARE: Final = 0.75
"""A temperature, or a cut to top-k, leaves 0.41 of the tokens so near."""

_SLOPE: Final = 0.03
_OFF_LINE_SHARE: Final = 0.5
"""The largest share of the standard deviation of d that may be off the line; an offset has far more."""

_AGREES: Final = 3.0
_DIFFERS: Final = 5.0
"""Standard errors of a mean."""

_LIKELY: Final = (0.5, 0.99)
_LIKELY_SHARE: Final = 0.1
_BELOW_LEAST: Final = 0.98
_BELOW_LEAST_SHARE: Final = 0.01


@dataclass(frozen=True)
class OtherBase:
    """A column that holds logarithms to a base other than e."""

    column: ScoreColumn
    """The column; `both` means the log-probs of both sides."""
    base: int

    @property
    def name(self) -> str:
        return base_name(self.base)

    @property
    def nats(self) -> float:
        """The factor from this base to nats."""
        return math.log(self.base)


_OF_SIDES: Final = {
    **{OtherBase("log_pi", base): 1 / math.log(base) for base in BASES},
    **{OtherBase("log_mu", base): math.log(base) for base in BASES},
}
"""log pi over log mu."""
_OF_ENTROPIES: Final = {
    **{OtherBase("entropy", base): math.log(base) for base in BASES},
    **{OtherBase("both", base): 1 / math.log(base) for base in BASES},
}
"""-log p over the entropy."""


@dataclass(frozen=True)
class BaseSums:
    """Sums over log pi and log mu that show whether a side is in another base."""

    telling: int = 0
    near: Floats = field(default_factory=lambda: np.zeros((len(_OF_SIDES), 6)))
    alike: int = 0
    """Of the telling tokens those on which the sides are nearly equal."""

    @classmethod
    def of(cls, log_pi: Reals, log_mu: Reals) -> "BaseSums":
        """The sums of two sides' log-probs [T], none of which is missing."""
        telling = (log_pi < -_LEAST_NATS) & (log_mu < -_LEAST_NATS)
        pi, mu = (side[telling].astype(np.float64) for side in (log_pi, log_mu))
        of_bases, log_ratios = [], np.log(pi / mu)
        for ratio in _OF_SIDES.values():
            is_near = np.abs(log_ratios - math.log(ratio)) <= _NEAR
            x, y = pi[is_near], mu[is_near]
            of_bases.append([x.size, x.sum(), y.sum(), x @ x, x @ y, y @ y])
        num_alike = int((np.abs(log_ratios) <= _NEAR).sum())
        return cls(pi.size, np.asarray(of_bases, dtype=np.float64), num_alike)

    def __add__(self, other: "BaseSums") -> "BaseSums":
        return BaseSums(self.telling + other.telling, self.near + other.near, self.alike + other.alike)

    @property
    def differ(self) -> bool:
        """Whether the sides are of other distributions: tokens of the one need not be as likely as the other's entropy
        says. Of few telling tokens, as texts of a sure model have, the share that is alike must be surely too small.
        """
        usual = _NEAR_SHARE * self.telling
        chance = 0.0 if self.telling >= _FEWEST_FOR_SIDES else _AGREES * math.sqrt(usual * (1 - _NEAR_SHARE))
        return self.alike < usual - chance

    @property
    def base(self) -> OtherBase | None:
        """The side that is in another base, if one is."""
        if self.telling < _FEWEST_FOR_SIDES:
            return None
        for (base, ratio), sums in zip(_OF_SIDES.items(), self.near, strict=True):
            if sums[0] >= _NEAR_SHARE * self.telling and _is_proportional(sums, ratio):
                return base
        return None

    def near_share(self, base: OtherBase) -> float:
        """Share of the telling tokens whose ratio is nearly that of this base."""
        return float(self.near[list(_OF_SIDES).index(base), 0]) / max(1, self.telling)

    def slope(self, base: OtherBase) -> float:
        """The slope of log pi over log mu by least squares, through 0."""
        sums = self.near[list(_OF_SIDES).index(base)]
        return float(sums[4] / sums[5])


def _is_proportional(sums: Floats, ratio: float) -> bool:
    """Whether the line through 0 has this slope and fits the tokens better than an offset does."""
    count, pi, mu, pi_pi, pi_mu, mu_mu = sums.tolist()
    off_line = pi_pi - 2 * ratio * pi_mu + ratio**2 * mu_mu
    squares_of_d = pi_pi - 2 * pi_mu + mu_mu
    spread_of_d = squares_of_d - (pi - mu) ** 2 / count
    return bool(abs(pi_mu / mu_mu / ratio - 1) <= _SLOPE and off_line <= _OFF_LINE_SHARE**2 * spread_of_d)


@dataclass(frozen=True)
class EntropySums:
    """Sums over tokens' log p and entropies H that show whether either is in another base."""

    nats: Floats = field(default_factory=lambda: np.zeros(3))
    """The `moments` of log p + H [3]."""
    halves: Floats = field(default_factory=lambda: np.zeros((len(_OF_ENTROPIES), 2, 3)))
    """The `moments` of log p + c H with the factor c of each base, of unsure and of sure tokens [4, 2, 3]."""
    likely: int = 0
    """The number of tokens with a p above 0.5."""
    below: int = 0
    """The number of likely tokens whose H is below the least that such a p allows."""

    @classmethod
    def of(cls, log_probs: Reals, entropy: Reals, unsure_above: float) -> "EntropySums":
        """The sums of values [T], none of which is missing; tokens of more entropy than `unsure_above` are unsure.

        E[-log p] is the entropy for tokens drawn from p, so that the terms are differences of a martingale, which do
        not correlate.
        """
        log_p, nats = (values.astype(np.float64) for values in (log_probs, entropy))
        is_unsure = nats > unsure_above
        halves = [
            [moments((log_p + ratio * nats)[half]) for half in (is_unsure, ~is_unsure)]
            for ratio in _OF_ENTROPIES.values()
        ]
        prob = np.exp(log_p)
        is_likely = (prob > _LIKELY[0]) & (prob < _LIKELY[1])
        p, q = prob[is_likely], 1 - prob[is_likely]
        least = -p * np.log(p) - q * np.log(q)
        return cls(
            moments(log_p + nats),
            np.asarray(halves),
            int(is_likely.sum()),
            int((nats[is_likely] < _BELOW_LEAST * least).sum()),
        )

    def __add__(self, other: "EntropySums") -> "EntropySums":
        return EntropySums(
            self.nats + other.nats, self.halves + other.halves, self.likely + other.likely, self.below + other.below
        )

    @property
    def base(self) -> OtherBase | None:
        """The base of the entropies, or of the log-probs of both sides, where it is another one."""
        if self.nats[0] < FEWEST_FOR_ENTROPIES or not entropies_differ(self.nats):
            return None
        fits = [fit for fit in self.misfits if _OF_ENTROPIES[fit[1]] < 1 or self._are_surprising]
        errors, base = min(fits, key=lambda fit: fit[0])
        return base if errors <= _AGREES else None

    @property
    def is_open(self) -> bool:
        """Whether log p + H differs from 0 and only more tokens can show whether a base explains that."""
        if not entropies_differ(self.nats):
            return False
        tokens = self.nats[0]
        return bool(tokens < FEWEST_FOR_ENTROPIES or (tokens < _ENOUGH and _smallest_misfit(self.misfits) <= _AGREES))

    @property
    def are_nats(self) -> bool:
        """Whether enough tokens show that the entropies are in nats and in no other base."""
        return bool(
            self.nats[0] >= FEWEST_FOR_ENTROPIES
            and errors_from_0(self.nats) <= _AGREES < _smallest_misfit(self.misfits)
        )

    @property
    def misfits(self) -> list[tuple[float, OtherBase]]:
        """The standard errors by which the halves differ from what each base predicts."""
        return [(_misfit(halves), base) for halves, base in zip(self.halves, _OF_ENTROPIES, strict=True)]

    @property
    def _are_surprising(self) -> bool:
        """Whether -log p exceeds the entropy by its unit, and not because sampling had a flatter distribution.

        In another base no distribution has both values at likely tokens; where few tokens are likely, this is assumed.
        """
        return self.likely < _LIKELY_SHARE * self.nats[0] or self.below >= _BELOW_LEAST_SHARE * self.likely


def _smallest_misfit(misfits: Iterable[tuple[float, OtherBase]]) -> float:
    return min(errors for errors, _ in misfits)


def _misfit(halves: Floats) -> float:
    """The larger misfit of the two halves [2, 3]; infinite where one has few tokens."""
    if halves[:, 0].min() < _FEWEST_OF_A_HALF:
        return math.inf
    return max(errors_from_0(half) for half in halves)


def base_name(base: int) -> str:
    return "base 2 (bits)" if base == 2 else f"base {base}"


def base_of_sides(log_pi: Reals, log_mu: Reals) -> OtherBase | None:
    """The side [T] that is in another base than the other, if one is."""
    return BaseSums.of(log_pi, log_mu).base


def base_of_entropies(log_probs: Reals, entropy: Reals) -> OtherBase | None:
    """`EntropySums.base` of tokens with these log-probs and entropies [T]."""
    if not entropy.size:
        return None
    return EntropySums.of(log_probs, entropy, float(np.median(entropy))).base
