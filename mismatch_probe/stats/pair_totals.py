"""The metrics of a pair from totals that can be added up: each rank of a trainer sums its own responses.

The terms and the functions of totals are those that `stats.metrics` uses, so the values are the same up to rounding.
Intervals and quantiles need the responses themselves and are absent. Partner totals show whether responses carry the
scores of other responses.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.stats.intervals import correlation, squared_variation
from mismatch_probe.stats.metrics import clip_log_ratios, k3_terms, weight_excess
from mismatch_probe.stats.sequences import Floats, Ints, Reals, Sequences, TokenPair
from mismatch_probe.stats.tails import LOG_BOUND, relative_excess
from mismatch_probe.stats.totals import AddableTotals

_MIDDLE: Final = 0.5
"""The point about which moments of probabilities are taken."""


@dataclass(frozen=True)
class WeightTotals(AddableTotals):
    """Sums over weights w = e^x of u = w / c - 1 and of u^2, with c as in `mixture.relative_excess`."""

    counts = ("count",)
    signed_sums = ("excess",)

    count: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    highest_log: float = -math.inf
    lowest_log: float = math.inf

    @classmethod
    def of(cls, log_ratios: Floats) -> Self:
        """The sums over x [K], of which there is at least one."""
        excess = relative_excess(log_ratios)
        return cls(
            count=float(len(log_ratios)),
            excess=float(excess.sum()),
            squares=float((excess**2).sum()),
            highest_log=float(log_ratios.max()),
            lowest_log=float(log_ratios.min()),
        )

    def __add__(self, other: Self) -> Self:
        highest, lowest = max(self.highest_log, other.highest_log), min(self.lowest_log, other.lowest_log)
        log_c = _log_scale(highest, lowest)
        first, second = self._relative_to(log_c), other._relative_to(log_c)
        count, excess, squares = (mine + theirs for mine, theirs in zip(first, second, strict=True))
        return type(self)(count, excess, squares, highest, lowest)

    @property
    def share(self) -> float:
        """ESS / n; NaN without weights."""
        with np.errstate(all="ignore"):
            totals = np.array([self.count, self.excess, self.squares])
            return float(1 / (1 + squared_variation(*totals[:, None])[0]))

    def _relative_to(self, log_c: float) -> tuple[float, float, float]:
        """The count and both sums with another c."""
        change = math.expm1(_log_scale(self.highest_log, self.lowest_log) - log_c)
        sum_of_squares = self.squares + 2 * self.excess + self.count
        return (
            self.count,
            self.excess + change * (self.excess + self.count),
            self.squares + 2 * change * (self.squares + self.excess) + change**2 * sum_of_squares,
        )


def _log_scale(highest: float, lowest: float) -> float:
    return highest if math.isfinite(highest) and max(abs(highest), abs(lowest)) > LOG_BOUND else 0.0


@dataclass(frozen=True)
class PairTotals(AddableTotals):
    """Sums over a pair's tokens, and over its sequences of which no token is left out.

    A field named as a metric of `stats.metrics` is the sum over tokens or sequences of the values that the metric
    averages. Fields `about_*` are moments of probabilities about 1/2.
    """

    counts = ("tokens", "sequences")
    signed_sums = (
        *("diff", "kl_k3", "about_pi", "about_mu", "about_pi_mu", "excess", "chi2_token", "chi2_seq", "log_ppl_diff"),
        "entropies",
    )

    tokens: float = 0.0
    sequences: float = 0.0
    diff: float = 0.0
    diff_squared: float = 0.0
    abs_diff: float = 0.0
    highest_abs_diff: float = 0.0
    abs_diff_seq: float = 0.0
    kl_k3: float = 0.0
    kl_k3_squared: float = 0.0
    """The squares of the sums over prompts; all responses to a prompt must be in one part."""
    mult_error: float = 0.0
    prob_abs_diff: float = 0.0
    highest_prob_diff: float = -math.inf
    lowest_prob_diff: float = math.inf
    about_pi: float = 0.0
    about_mu: float = 0.0
    about_pi_pi: float = 0.0
    about_mu_mu: float = 0.0
    about_pi_mu: float = 0.0
    excess: float = 0.0
    excess_squared: float = 0.0
    chi2_token: float = 0.0
    chi2_seq: float = 0.0
    log_ppl_diff: float = 0.0
    ppl_ratio: float = 0.0
    entropies: float = 0.0
    """The sum of pi's entropies, nats."""
    token_weights: WeightTotals = field(default_factory=WeightTotals)
    sequence_weights: WeightTotals = field(default_factory=WeightTotals)

    @classmethod
    def of(cls, pair: TokenPair) -> Self:
        """Sum all tokens of a pair."""
        diff = pair.diff
        excess = weight_excess(diff)
        pi, mu = pair.prob_pi - _MIDDLE, pair.prob_mu - _MIDDLE
        k3 = k3_terms(diff)
        with np.errstate(over="ignore"):
            mult_error = float(np.exp(pair.abs_diff).sum())
            of_prompts = pair.sequences.sum_by_cluster(pair.sequences.sum_by_sequence(k3))
            kl_k3_squared = float(of_prompts @ of_prompts)
        return cls(
            tokens=float(len(diff)),
            diff=float(diff.sum()),
            diff_squared=float(diff @ diff),
            abs_diff=float(pair.abs_diff.sum()),
            highest_abs_diff=float(pair.abs_diff.max()),
            kl_k3=float(k3.sum()),
            kl_k3_squared=kl_k3_squared,
            mult_error=mult_error,
            prob_abs_diff=float(np.abs(pair.prob_diff).sum()),
            highest_prob_diff=float(pair.prob_diff.max()),
            lowest_prob_diff=float(pair.prob_diff.min()),
            about_pi=float(pi.sum()),
            about_mu=float(mu.sum()),
            about_pi_pi=float(pi @ pi),
            about_mu_mu=float(mu @ mu),
            about_pi_mu=float(pi @ mu),
            excess=float(excess.sum()),
            excess_squared=float(excess @ excess),
            chi2_token=float(np.expm1(2 * clip_log_ratios(diff)).sum()),
            entropies=0.0 if pair.entropy_pi is None else float(pair.entropy_pi.sum(dtype=np.float64)),
            token_weights=WeightTotals.of(diff),
            **_sums_over_sequences(pair.of_whole_responses),
        )

    def values(self) -> dict[str, float]:
        """The metrics by their canonical names; NaN where one does not exist or is beyond the largest float64.

        `prob_pearson` is NaN also where the probabilities of a side vary by less than 1e-6.

        `is_ratio_mean_token_error` is the standard error of `is_ratio_mean_token` where that is 1: e^d - 1 of tokens
        sampled from mu are then differences of a martingale, which do not correlate. `kl_k3_error` is that of `kl_k3`
        about 0, not about its mean, with prompts as clusters: it is as large as `kl_k3` where one prompt makes it.
        """
        tokens, sequences = np.float64(self.tokens), np.float64(self.sequences)
        moments = np.array(
            [self.tokens, self.about_pi, self.about_mu, self.about_pi_pi, self.about_mu_mu, self.about_pi_mu]
        )
        with np.errstate(all="ignore"):
            values = {
                "kl_k1": -self.diff / tokens,
                "kl_k3": self.kl_k3 / tokens,
                "kl_k3_error": np.sqrt(self.kl_k3_squared) / tokens,
                "abs_logprob_diff": self.abs_diff / tokens,
                "abs_logprob_diff_max": self.highest_abs_diff,
                "abs_logprob_diff_seq": self.abs_diff_seq / sequences,
                "logprob_diff_rms": np.sqrt(self.diff_squared / tokens),
                "token_mult_prob_error": self.mult_error / tokens,
                "prob_abs_diff": self.prob_abs_diff / tokens,
                "prob_abs_diff_max": max(self.highest_prob_diff, -self.lowest_prob_diff),
                "prob_diff_extremes_max": self.highest_prob_diff,
                "prob_diff_extremes_min": self.lowest_prob_diff,
                "prob_pearson": correlation(*moments[:, None])[0],
                "is_ratio_mean_token": 1 + self.excess / tokens,
                "is_ratio_mean_token_error": np.sqrt(self.excess_squared) / tokens,
                "chi2_token": self.chi2_token / tokens,
                "chi2_seq": self.chi2_seq / sequences,
                "log_ppl_diff": self.log_ppl_diff / sequences,
                "ppl_ratio": self.ppl_ratio / sequences,
                "ess_token": self.token_weights.share,
                "ess_seq": self.sequence_weights.share,
                "kl_entropy_ratio": self.kl_k3 / np.float64(self.entropies),
            }
        return {name: float(value) if np.isfinite(value) else math.nan for name, value in values.items()}


def _sums_over_sequences(pair: TokenPair | None) -> dict[str, Any]:
    """The sums over sequences; none where no sequence is complete."""
    if pair is None:
        return {}
    lengths = pair.sequences.lengths
    log_ppl_diff = -pair.diff_sums / lengths
    return {
        "sequences": float(len(lengths)),
        "abs_diff_seq": float((pair.sequences.sum_by_sequence(pair.abs_diff) / lengths).sum()),
        "chi2_seq": float(np.expm1(2 * clip_log_ratios(pair.diff_sums)).sum()),
        "log_ppl_diff": float(log_ppl_diff.sum()),
        "ppl_ratio": float((1 + weight_excess(log_ppl_diff)).sum()),
        "sequence_weights": WeightTotals.of(pair.diff_sums),
    }


MOST_EXAMINED: Final = 64
"""The number of responses whose partner is searched, and of their first tokens that are compared: enough to decide,
and quick for any batch."""
RESTORED_RMS: Final = 0.2
"""The largest rms deviation from the true partner, as a share of the deviation from the wrong one; also the share of
the largest deviation of all above which a response disagrees."""
LEAST_RESTORED: Final = 0.8
"""The share of examined responses that must have a partner, each a different one."""
_LEAST_OVERLAP: Final = 8


@dataclass(frozen=True)
class PartnerTotals(AddableTotals):
    """Counts of responses that carry the scores of other responses, their partners."""

    counts = ("off", "examined", "partners")

    off: float = 0.0
    """The responses that disagree."""
    examined: float = 0.0
    """Those of them whose partner was searched."""
    partners: float = 0.0
    """The distinct partners that were found."""

    @classmethod
    def of(cls, pair: TokenPair, least: float, most: float | None = None) -> Self:
        """Search the partners of the responses whose rms of d is above `least` nats.

        most: the largest rms deviation from a true partner, nats; by `RESTORED_RMS` where None.
        """
        own = rms_by_sequence(pair)
        rows_off = np.flatnonzero(own > max(least, RESTORED_RMS * own.max()))
        if rows_off.size < 2:
            return cls(off=float(rows_off.size))
        rows_to_examine = rows_off[
            np.linspace(0, rows_off.size - 1, min(rows_off.size, MOST_EXAMINED)).astype(np.int64)
        ]
        long = pair.sequences.lengths >= _LEAST_OVERLAP
        candidates = rows_off[long[rows_off]]
        if candidates.size < 2:
            return cls(off=float(rows_off.size), examined=float(rows_to_examine.size))
        log_pi, log_mu = (_first_tokens(leg, pair.sequences) for leg in (pair.log_pi, pair.log_mu))
        most = RESTORED_RMS * float(np.median(own[rows_off])) if most is None else most
        partners = {
            _best_partner(row, candidates, log_pi, log_mu, most) for row in rows_to_examine[long[rows_to_examine]]
        } - {None}
        return cls(float(rows_off.size), float(rows_to_examine.size), float(len(partners)))

    @property
    def share(self) -> float:
        """The share of the examined responses that fit another response."""
        return self.partners / self.examined if self.examined else 0.0

    @property
    def are_exchanged(self) -> bool:
        return self.examined > 0 and self.share >= LEAST_RESTORED


def rms_by_sequence(pair: TokenPair) -> Floats:
    """Root mean square of d in each response [N]."""
    return np.asarray(np.sqrt(pair.sequences.sum_by_sequence(pair.diff**2) / pair.sequences.lengths))


def _first_tokens(leg: Reals, sequences: Sequences) -> Floats:
    """The first tokens of each response, NaN beyond its end [N, C]."""
    positions = sequences.positions
    heads = np.full((sequences.num_sequences, min(MOST_EXAMINED, int(positions.max()) + 1)), np.nan)
    inside = np.flatnonzero(positions < MOST_EXAMINED)
    rows: Ints = np.repeat(np.arange(sequences.num_sequences), sequences.lengths)
    heads[rows[inside], positions[inside]] = leg[inside]
    return heads


def _best_partner(row: int, candidates: Ints, log_pi: Floats, log_mu: Floats, most: float) -> int | None:
    """The response whose log pi fits this one's log mu best; None where the rms deviation is above `most` nats."""
    others = candidates[candidates != row]
    squares = (log_pi[others] - log_mu[row]) ** 2
    overlap = np.isfinite(squares).sum(axis=1)
    mean = np.where(overlap >= _LEAST_OVERLAP, np.nansum(squares, axis=1) / np.maximum(overlap, 1), np.inf)
    best = int(mean.argmin())
    return int(others[best]) if mean[best] <= most**2 else None
