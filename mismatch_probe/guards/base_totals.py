"""Whether log-probs are logarithms to another base than e, from sums that ranks add up, by `stats.bases`."""

from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from mismatch_probe.stats.bases import BaseSums, EntropySums, OtherBase
from mismatch_probe.stats.sequences import Reals
from mismatch_probe.stats.totals import AddableTotals

BASE_OF_PI: Final = "mismatch/base_pi"
BASE_OF_MU: Final = "mismatch/base_mu"
_OF_SIDES: Final = ("pi_in_2", "pi_in_10", "mu_in_2", "mu_in_10")
_OF_ENTROPIES: Final = ("entropy_in_2", "entropy_in_10", "both_in_2", "both_in_10")
_METRICS_OF: Final = {"log_pi": (BASE_OF_PI,), "log_mu": (BASE_OF_MU,), "both": (BASE_OF_PI, BASE_OF_MU), "entropy": ()}


@dataclass(frozen=True)
class NearTotals(AddableTotals):
    """Of the tokens whose log pi is about one multiple of log mu."""

    counts = ("tokens",)
    signed_sums = ("pi", "mu")

    tokens: float = 0.0
    pi: float = 0.0
    mu: float = 0.0
    pi_squared: float = 0.0
    pi_mu: float = 0.0
    mu_squared: float = 0.0


@dataclass(frozen=True)
class Moments(AddableTotals):
    """Number, sum and sum of squares of terms [nats]."""

    counts = ("count",)
    signed_sums = ("total",)

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True)
class HalfMoments(AddableTotals):
    """Of log p and one multiple of the entropy, at tokens of which pi is unsure, for its part, and at the others."""

    unsure: Moments = field(default_factory=Moments)
    sure: Moments = field(default_factory=Moments)


@dataclass(frozen=True)
class BaseTotals(AddableTotals):
    """`BaseSums` and `EntropySums` of tokens; the multiples are in their order."""

    counts = ("telling", "likely", "below")

    telling: float = 0.0
    pi_in_2: NearTotals = field(default_factory=NearTotals)
    pi_in_10: NearTotals = field(default_factory=NearTotals)
    mu_in_2: NearTotals = field(default_factory=NearTotals)
    mu_in_10: NearTotals = field(default_factory=NearTotals)
    surprise: Moments = field(default_factory=Moments)
    entropy_in_2: HalfMoments = field(default_factory=HalfMoments)
    entropy_in_10: HalfMoments = field(default_factory=HalfMoments)
    both_in_2: HalfMoments = field(default_factory=HalfMoments)
    both_in_10: HalfMoments = field(default_factory=HalfMoments)
    likely: float = 0.0
    below: float = 0.0

    @classmethod
    def of(cls, log_pi: Reals, log_mu: Reals, entropy: Reals | None) -> Self:
        """Of the log-probs of tokens and pi's entropies there [T]; None where they are not known."""
        sides = BaseSums.of(log_pi, log_mu)
        pi_in_2, pi_in_10, mu_in_2, mu_in_10 = (NearTotals(*row) for row in sides.near.tolist())
        of_sides = cls(float(sides.telling), pi_in_2, pi_in_10, mu_in_2, mu_in_10)
        if entropy is None or not entropy.size:
            return of_sides
        sums = EntropySums.of(log_pi, entropy, float(np.median(entropy)))
        entropy_in_2, entropy_in_10, both_in_2, both_in_10 = (
            HalfMoments(Moments(*unsure), Moments(*sure)) for unsure, sure in sums.halves.tolist()
        )
        return replace(
            of_sides,
            surprise=Moments(*sums.nats.tolist()),
            entropy_in_2=entropy_in_2,
            entropy_in_10=entropy_in_10,
            both_in_2=both_in_2,
            both_in_10=both_in_10,
            likely=float(sums.likely),
            below=float(sums.below),
        )

    @property
    def base(self) -> OtherBase | None:
        """The column that is in another base, if one is."""
        totals_of_sides = np.array([getattr(self, name).to_array() for name in _OF_SIDES])
        of_sides = BaseSums(int(self.telling), totals_of_sides).base
        if of_sides is not None:
            return of_sides
        return self.entropies.base

    @property
    def entropies(self) -> EntropySums:
        halves = [getattr(self, name).to_array().reshape(2, 3) for name in _OF_ENTROPIES]
        return EntropySums(self.surprise.to_array(), np.array(halves), int(self.likely), int(self.below))

    def metrics(self) -> dict[str, float]:
        """The base of each side where it is another one than e; else 0."""
        return base_metrics(self.base)


def base_metrics(base: OtherBase | None) -> dict[str, float]:
    """As `BaseTotals.metrics`, of what is in another base."""
    of_sides = () if base is None else _METRICS_OF[base.column]
    return {name: float(base.base) if base and name in of_sides else 0.0 for name in (BASE_OF_PI, BASE_OF_MU)}
