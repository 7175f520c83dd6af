"""What guards read of a step's responses, as sums that ranks add up, and the metrics that follow from them.

Among them: whether log-probs are logarithms to another base than e, by `stats.bases`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from mismatch_probe.errors import message_of
from mismatch_probe.guards.departure_totals import DepartureTotals, SurpriseTotals, TemperatureTotals
from mismatch_probe.guards.rewards import RewardTotals, return_nats
from mismatch_probe.stats.bases import BaseSums, EntropySums, OtherBase
from mismatch_probe.stats.copies import CopyTotals, RowCopyTotals
from mismatch_probe.stats.pair_totals import PairTotals, PartnerTotals
from mismatch_probe.stats.sequences import Reals
from mismatch_probe.stats.totals import AddableTotals
from mismatch_probe.stats.zeros import LeftOutTotals

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


Metrics = dict[str, float]

_NAMES_OF_PAIR: Final = {
    "prob_diff_max": "prob_diff_extremes_max",
    "prob_diff_min": "prob_diff_extremes_min",
    "is_ratio_mean": "is_ratio_mean_token",
    "is_ratio_mean_error": "is_ratio_mean_token_error",
}
_OF_PAIR: Final = {
    name: _NAMES_OF_PAIR.get(name, name)
    for name in (
        "kl_k1", "kl_k3", "kl_k3_error", "abs_logprob_diff", "abs_logprob_diff_max", "abs_logprob_diff_seq",
        "logprob_diff_rms", "token_mult_prob_error", "prob_abs_diff", "prob_abs_diff_max", "prob_diff_max",
        "prob_diff_min", "prob_pearson", "chi2_token", "chi2_seq", "log_ppl_diff", "ppl_ratio", "is_ratio_mean",
        "is_ratio_mean_error", "ess_token", "ess_seq", "kl_entropy_ratio",
    )
}  # fmt: skip
"""Name of a step's metric: name among the pair's."""

_OF_A_COPY: Final = (
    "mismatch/nonfinite_tokens", "mismatch/missing_mu_tokens", "mismatch/zero_tokens", "mismatch/above_zero_tokens",
    "mismatch/left_out_share", "mismatch/copied_share", "mismatch/copied_rows_share", BASE_OF_PI, BASE_OF_MU,
    "mismatch/logprob_mu", "mismatch/logprob_mu_rms", "policy/entropy",
)  # fmt: skip
"""Metrics that are known where one side is a copy of the other."""
_WITH_ENTROPY: Final = ("kl_entropy_ratio",)
_OF_WHOLE_RESPONSES: Final = ("abs_logprob_diff_seq", "chi2_seq", "log_ppl_diff", "ppl_ratio", "ess_seq")


@dataclass(frozen=True)
class Sums(AddableTotals):
    """Of a step's responses on one rank, or on all."""

    counts = (
        "tokens", "missing_mu", "zeros", "above_zero", "faults", "with_entropy", "responses", "highest_length", "cut",
        "cut_known",
    )  # fmt: skip

    tokens: float = 0.0
    left_out: LeftOutTotals = field(default_factory=LeftOutTotals)
    """Of the tokens of which both sides were given, those with something missing or no number; the sums are over the
    others, those of `surprise` also over tokens that lack mu alone.
    """
    rows: RowCopyTotals = field(default_factory=RowCopyTotals)
    """Rows in which both sides are equal."""
    missing_mu: float = 0.0
    """Tokens without a log-prob of mu."""
    zeros: float = 0.0
    """Tokens that are left out for a 0 that is no number."""
    above_zero: float = 0.0
    """Tokens with a log-prob above 0, or an entropy below."""
    faults: float = 0.0
    """Tokens that make the others worth nothing."""
    with_entropy: float = 0.0
    """Tokens with pi's entropy."""
    pair: PairTotals = field(default_factory=PairTotals)
    departure: DepartureTotals = field(default_factory=DepartureTotals)
    bases: BaseTotals = field(default_factory=BaseTotals)
    partners: PartnerTotals = field(default_factory=PartnerTotals)
    """Of responses that are far apart, how many fit another one of the same rank."""
    temperature: TemperatureTotals = field(default_factory=TemperatureTotals)
    surprise: SurpriseTotals = field(default_factory=SurpriseTotals)
    rewards: RewardTotals = field(default_factory=RewardTotals)
    responses: float = 0.0
    highest_length: float = 0.0
    cut: float = 0.0
    """Responses that ended at the length limit, of the `cut_known` for which that is known."""
    cut_known: float = 0.0

    def metrics(self) -> Metrics:
        """As in `metrics.jsonl`; what was not given is absent.

        `mismatch/drift_per_1000` is the mean of S per 1,000 tokens, which is -1000 kl_k1. Where the step `is_measured`
        not all of `mismatch/` is NaN but `mismatch/nonfinite_tokens`, `mismatch/missing_mu_tokens` and
        `mismatch/left_out_share`. Metrics of whole responses are absent where each of them lacks a token. Where one
        side is a copy of the other no mismatch is measured: what is `withheld` is absent.
        """
        metrics = {**self._mismatch(), **self.rewards.metrics()}
        for name in self.withheld:
            del metrics[name]
        if self.responses:
            metrics["response/length_mean"] = self.tokens / self.responses
            metrics["response/length_max"] = self.highest_length
        if self.compared and self.is_measured:
            metrics["response/return_nats"] = return_nats(self.responses, -self.departure.log_mu)
        if self.cut_known:
            metrics["response/truncated_share"] = self.cut / self.cut_known
        return metrics

    def without_entropies(self) -> Self:
        return replace(self, with_entropy=0.0, temperature=TemperatureTotals(), surprise=SurpriseTotals())

    def impossible(self) -> str | None:
        """As of all totals; and what does not fit together."""
        num_measured = self.left_out.tokens - self.left_out.out
        fit = {
            "pair.tokens": self.pair.tokens == num_measured,
            "departure.tokens": self.departure.tokens == num_measured,
            "departure.responses": min(1, num_measured) <= self.departure.responses <= self.responses,
            "left_out.tokens": self.left_out.tokens <= self.tokens,
            "rows.rows": self.rows.rows <= self.responses,
            "rows.telling": self.copies.equal <= self.copies.telling <= self.left_out.tokens,
            "bases.telling": self.bases.telling <= num_measured,
            "with_entropy": self.with_entropy <= self.left_out.tokens,
            "surprise.tokens": self.surprise.tokens >= min(self.with_entropy, num_measured, 1),
            "rewards.nonfinite": self.rewards.nonfinite <= self.rewards.responses,
            "rewards.flat_groups": self.rewards.flat_groups <= self.rewards.groups,
            "cut": self.cut <= self.cut_known,
        }
        others = (f"{name} does not fit the other numbers" for name, fits in fit.items() if not fits)
        return super().impossible() or next(others, None) or self._overflow()

    def _overflow(self) -> str | None:
        try:
            self.metrics()
        except (ArithmeticError, ValueError) as error:
            return f"no metrics follow from its numbers ({message_of(error)})"
        return None

    @property
    def is_copied(self) -> bool:
        """Whether one side is a copy of the other, which is no measurement."""
        return self.is_measured and self.copies.is_copy

    @property
    def copies(self) -> CopyTotals:
        """How often both sides are equal."""
        return self.rows.all_rows

    @property
    def withheld(self) -> tuple[str, ...]:
        """The metrics that are absent because one side is a copy of the other."""
        return tuple(name for name in self._mismatch() if name not in _OF_A_COPY) if self.is_copied else ()

    @property
    def compared(self) -> float:
        """Tokens of which both sides were given."""
        return self.left_out.tokens

    @property
    def is_measured(self) -> bool:
        """Whether few tokens are left out, and none of them is a fault."""
        return not self.faults and self.left_out.are_few

    def _mismatch(self) -> Metrics:
        if not self.compared:
            return {}
        with_entropy = self.with_entropy == self.compared
        values = self.pair.values()
        metrics = {
            f"mismatch/{name}": values[of_pair]
            for name, of_pair in _OF_PAIR.items()
            if (with_entropy or name not in _WITH_ENTROPY)
            and (self.pair.sequences or not self.is_measured or name not in _OF_WHOLE_RESPONSES)
        }
        metrics["mismatch/drift_per_1000"] = -1000 * values["kl_k1"]
        metrics |= {f"mismatch/{name}": value for name, value in self._departure().items()}
        metrics |= self.bases.metrics()
        metrics["mismatch/exchanged_share"] = self.partners.share
        if with_entropy:
            metrics["mismatch/temperature_fit"] = self.temperature.ratio
            for name in ("mean", "error", "excess"):
                metrics[f"mismatch/surprise_{name}"] = getattr(self.surprise, name) if self.is_measured else math.nan
            metrics["policy/entropy"] = self.surprise.entropies / self.surprise.tokens if self.is_measured else math.nan
        if not self.is_measured:
            metrics = dict.fromkeys(metrics, math.nan)
        counts = {
            "mismatch/nonfinite_tokens": self.left_out.out,
            "mismatch/missing_mu_tokens": self.missing_mu,
            "mismatch/zero_tokens": self.zeros,
            "mismatch/above_zero_tokens": self.above_zero,
            "mismatch/left_out_share": self.left_out.share,
            "mismatch/copied_share": self.copies.share if self.is_copied else 0.0,
            "mismatch/copied_rows_share": 0.0 if self.is_copied else self.rows.copied / max(1.0, self.responses),
        }
        return metrics | counts

    def _departure(self) -> Metrics:
        """Where no token could be summed all of `mismatch/` is NaN."""
        return (self.departure if self.departure.tokens else DepartureTotals(tokens=1.0, responses=1.0)).metrics()
