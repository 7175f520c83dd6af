"""Tokens that somebody sampled, held against a law that says which tokens they should be.

Where the law names one token (greedy decoding, or known noise), a token that differs is rounding, or another law.
Rounding exchanges two tokens whose scores are closer than it moves them, so the margins of all positions say how often
that should happen, and the gaps of the tokens that differ how far the scores were moved: `fit_noise` puts both in one
number.

Where the law names probabilities alone, it is tested by the tokens' log-probs and ranks, and alternatives by likelihood
ratios. Under the law the product of ratios is at most 1 on average at any time, so that it exceeds 1/a with a chance of
at most a [Ville 1939; Ramdas et al. 2023, Statistical Science 38:576].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special
from scipy import stats as scipy_stats

from mismatch_probe.stats.sequences import Floats, Ints

_DEGREES: Final = 4.0
"""Of Student's t, which an error of rounding is taken to have: its tail is longer than a normal one's."""
_MEDIAN_OF_SIZE: Final = float(special.stdtrit(_DEGREES, 0.75))
_LEAST_SCALE: Final = 1e-6
"""Nats: FP32 rounds no finer."""
_NEIGHBOURS: Final = 200
"""Positions with a like margin, whose errors give the scale at one."""
_TIMES: Final = np.geomspace(0.01, 1e5, 141)
_FEW: Final = 1e-300


@dataclass(frozen=True)
class Rounding:
    """How far a format moves the margin between the best two tokens: the scale in nats at each position [T]."""

    scales: Floats

    @classmethod
    def of(cls, margins: Floats, errors: Floats) -> "Rounding":
        """margins [T]: between the best two tokens in FP32, nats. errors [T]: of the same margins in the format.

        The scale at a position is the median size of the errors at positions with a margin like its own.
        """
        order = np.argsort(margins, kind="stable")
        width = min(_NEIGHBOURS, margins.size)
        medians = np.median(np.lib.stride_tricks.sliding_window_view(np.abs(errors)[order], width), axis=1)
        first = np.clip(np.arange(margins.size) - width // 2, 0, medians.size - 1)
        scales = np.empty(margins.size)
        scales[order] = medians[first]
        return cls(np.maximum(scales / _MEDIAN_OF_SIZE, _LEAST_SCALE))

    def chance(self, distances: Floats, times: float = 1.0) -> Floats:
        """Of being moved by at least these distances (nats) [T] towards each other, at so many times the rounding."""
        return np.asarray(special.stdtr(_DEGREES, -distances / (times * self.scales)))


@dataclass(frozen=True)
class NoiseFit:
    """By how many times a format's rounding the served scores seem to be moved."""

    times: float
    low: float
    high: float
    expected_differing: float
    """The number of tokens that differ by the format's rounding alone."""
    log_likelihood: float
    """Of the tokens, at the best number of times; one that differs counts by the chance of being moved by its gap."""


def fit_noise(rounding: Rounding, margins: Floats, gaps: Floats, clusters: Ints, level: float) -> NoiseFit:
    """Maximum likelihood over all positions [T]; the interval is by profile likelihood.

    margins: between the best two tokens. gaps: by how much the served token is below the best one, 0 where it is the
    best. Noise that brings many tokens into play counts for more than it is. clusters: the prompt of each token; where
    whole prompts err together, the interval is wider by their overdispersion [McCullagh and Nelder 1989, Generalized
    Linear Models, section 4.5].
    """
    differs = gaps > 0
    distances = np.where(differs, gaps, margins)

    def log_likelihood(times: float) -> Floats:
        chance = rounding.chance(distances, times)
        return np.where(differs, np.log(np.maximum(chance, _FEW)), np.log1p(-np.minimum(chance, 0.5)))

    totals = np.array([log_likelihood(times).sum() for times in _TIMES])
    best = int(totals.argmax())
    reach = special.chdtri(1, 1 - level) / 2 * _overdispersion(log_likelihood, best, clusters)
    inside = np.flatnonzero(totals >= totals[best] - reach)
    expected = float(rounding.chance(margins).sum())
    low, high = int(inside[0]), int(inside[-1])
    return NoiseFit(
        float(_TIMES[best]) if differs.any() else 0.0,
        float(_TIMES[low]) if low > 0 else 0.0,
        float(_TIMES[high]),
        expected,
        float(totals[best]),
    )


def _overdispersion(log_likelihood: Callable[[float], Floats], best: int, clusters: Ints) -> float:
    """The variance of the prompts' scores over what independent tokens have; at least 1."""
    if not 0 < best < len(_TIMES) - 1:
        return 1.0
    below, at, above = (log_likelihood(times) for times in _TIMES[best - 1 : best + 2])
    step = math.log(_TIMES[1] / _TIMES[0])
    information = -float((above - 2 * at + below).sum()) / step**2
    scores = np.bincount(clusters, weights=(above - below) / (2 * step))
    return max(1.0, float((scores**2).sum()) / information) if information > 0 else 1.0


def tokens_to_see_noise(rounding: Rounding, margins: Floats, times: float, allowance: float, chance: float) -> float:
    """How many tokens tell noise of so many times the rounding from what is tolerated, at that chance of error.

    By the mean of the log-likelihood ratio a token [Wald 1947, Sequential Analysis, section 3.4].
    """
    if times <= allowance:
        return math.inf
    chance_of_noise, chance_allowed = rounding.chance(margins, times), rounding.chance(margins, allowance)
    information = float(
        (
            special.rel_entr(chance_of_noise, chance_allowed)
            + special.rel_entr(1 - chance_of_noise, 1 - chance_allowed)
        ).mean()
    )
    return math.log(1 / chance) / information if information > 0 else math.inf


def tokens_to_see(kl_nats: float, chance: float) -> float:
    """How many tokens a likelihood ratio needs on average to exceed 1/chance, at that KL a token."""
    return math.log(1 / chance) / kl_nats if kl_nats > 0 else math.inf


@dataclass(frozen=True)
class LawTest:
    """Whether sampled tokens follow the law that was claimed."""

    surprise: float
    """Mean of -log p of the tokens less the law's entropy, nats a token: positive where they are less likely than
    tokens of the law.
    """
    surprise_score: float
    """In standard errors: a sum of martingale differences."""
    rank_p_value: float
    """That the tokens' places in the law's order are the law's (Kolmogorov and Smirnov)."""

    @property
    def p_value(self) -> float:
        """Of the more telling of the two, corrected for there being two."""
        return min(1.0, 2 * min(2 * float(special.ndtr(-abs(self.surprise_score))), self.rank_p_value))


def hold_against_law(log_probs: Floats, entropies: Floats, variances: Floats, below: Floats, seed: int) -> LawTest:
    """All [T], under the law: the tokens' log-probs (nats), the entropy and the variance of log p of each position, and
    the probability of all tokens that are likelier than the sampled one.

    Ranks are made continuous by a uniform number within each token's own probability (randomised probability integral
    transform [Smith 1985, J. Forecasting 4:283]).
    """
    surprise = -(log_probs + entropies)
    spread = math.sqrt(max(float(variances.sum()), _FEW))
    within = np.random.default_rng(seed).random(log_probs.size)
    places = np.clip(below + within * np.exp(log_probs), 0, 1)
    return LawTest(
        float(surprise.mean()), float(surprise.sum() / spread), float(scipy_stats.kstest(places, "uniform").pvalue)
    )
