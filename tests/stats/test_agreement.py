"""Served tokens against a law: tokens drawn from a known law accuse nobody, tokens of another one are seen."""

import math

import numpy as np
import pytest
from scipy.special import log_softmax

from mismatch_probe.stats.agreement import (
    NoiseFit,
    Rounding,
    fit_noise,
    hold_against_law,
    tokens_to_see,
    tokens_to_see_noise,
)
from mismatch_probe.stats.sequences import Floats

TOKENS, VOCABULARY = 4000, 50
ROUNDING = 0.02
LEVEL = 0.999


def logits(seed: int, tokens: int = TOKENS) -> Floats:
    return np.random.default_rng(seed).normal(scale=2.0, size=(tokens, VOCABULARY))


def noise_of(times: float, seed: int, own_seed: int | None = None) -> tuple[NoiseFit, Rounding, Floats]:
    """Greedy tokens of scores moved by so many times the rounding, whose size another draw of it shows."""
    scores = logits(seed)
    moved = scores + times * ROUNDING * np.random.default_rng(seed + 1).normal(size=scores.shape)
    own = scores + ROUNDING * np.random.default_rng(own_seed or seed + 2).normal(size=scores.shape)
    order = np.argsort(-scores, axis=1)[:, :2]
    best, second = (np.take_along_axis(scores, order[:, [place]], axis=1)[:, 0] for place in (0, 1))
    own_best, own_second = (np.take_along_axis(own, order[:, [place]], axis=1)[:, 0] for place in (0, 1))
    rounding = Rounding.of(best - second, (own_best - own_second) - (best - second))
    served = moved.argmax(axis=1)
    gaps = best - scores[np.arange(TOKENS), served]
    clusters = np.arange(TOKENS) // 100
    return fit_noise(rounding, best - second, gaps, clusters, LEVEL), rounding, best - second


@pytest.mark.parametrize("seed", range(8))
def test_rounding_alone_is_one_times_the_rounding(seed: int) -> None:
    fit, _, _ = noise_of(1.0, 10 * seed)
    assert fit.low <= 1.3
    assert fit.high >= 0.8
    assert fit.low <= 3


@pytest.mark.parametrize("times", [6, 12, 40])
def test_scores_that_are_moved_farther_are_seen(times: float) -> None:
    fit, _, _ = noise_of(times, 7)
    assert fit.low > 3
    assert fit.high >= 0.8 * times


def test_tokens_that_all_agree_have_no_noise_and_an_upper_bound() -> None:
    fit, _, _ = noise_of(0.0, 3)
    assert (fit.times, fit.low) == (0.0, 0.0)
    assert 0 < fit.high < 1


def test_exact_arithmetic_has_a_least_rounding() -> None:
    margins = np.linspace(0.1, 5, 500)
    rounding = Rounding.of(margins, np.zeros(500))
    fit = fit_noise(rounding, margins, np.zeros(500), np.arange(500), LEVEL)
    assert fit.low == 0
    gaps = np.zeros(500)
    gaps[::50] = margins[::50]
    assert fit_noise(rounding, margins, gaps, np.arange(500), LEVEL).low > 100


def test_prompts_that_err_together_widen_the_interval() -> None:
    rng = np.random.default_rng(5)
    margins = rng.exponential(0.3, size=4000)
    rounding = Rounding(np.full(4000, ROUNDING))
    clusters = np.repeat(np.arange(40), 100)
    times = np.where(clusters < 4, 60.0, 0.5)
    moved = rounding.chance(margins, 1.0) * 0 + rng.random(4000) < rounding.chance(margins / times)
    gaps = np.where(moved, margins, 0.0)
    together = fit_noise(rounding, margins, gaps, clusters, LEVEL)
    spread = fit_noise(rounding, margins, gaps, rng.permutation(clusters), LEVEL)
    assert together.low < spread.low
    assert together.high > spread.high


def test_farther_moves_take_fewer_tokens_and_tolerated_ones_no_number() -> None:
    _, rounding, margins = noise_of(1.0, 2)
    counts = [tokens_to_see_noise(rounding, margins, times, 3.0, 1e-3) for times in (2, 6, 12, 40)]
    assert counts[0] == math.inf
    assert counts[1] > counts[2] > counts[3] > 0


def drawn(seed: int, temperature: float, *, top: int = VOCABULARY) -> float:
    """The p-value of the law at temperature 1 for tokens drawn at another, of the likeliest tokens alone."""
    scores, rng = logits(seed), np.random.default_rng(seed + 100)
    noisy = scores / temperature + rng.gumbel(size=scores.shape)
    order = np.argsort(-scores, axis=1)
    ranks = np.argsort(order, axis=1)
    tokens = np.where(ranks < top, noisy, -np.inf).argmax(axis=1)
    law = log_softmax(scores, axis=1)
    at = np.arange(TOKENS)
    entropies = -(np.exp(law) * law).sum(axis=1)
    variances = (np.exp(law) * law**2).sum(axis=1) - entropies**2
    below = np.where(law > law[at, tokens][:, None], np.exp(law), 0.0).sum(axis=1)
    return hold_against_law(law[at, tokens], entropies, variances, below, seed).p_value


def test_tokens_of_the_law_are_not_refuted_more_often_than_said() -> None:
    p_values = np.array([drawn(seed, 1.0) for seed in range(60)])
    assert (p_values < 0.001).sum() == 0
    assert (p_values < 0.05).sum() <= 8


@pytest.mark.parametrize("temperature", [0.9, 1.1, 0.8])
def test_another_temperature_is_refuted(temperature: float) -> None:
    assert drawn(4, temperature) < 1e-3


def test_a_cut_vocabulary_is_refuted() -> None:
    assert drawn(4, 1.0, top=10) < 1e-3


def test_a_likelihood_ratio_needs_tokens_in_inverse_proportion_to_its_kl() -> None:
    assert tokens_to_see(0.1, 1e-3) == pytest.approx(10 * math.log(1e3))
    assert tokens_to_see(0.0, 1e-3) == math.inf
