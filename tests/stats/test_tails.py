import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.tails import CLIP, TailDesign, draw, expectation
from mismatch_probe.difference.versus import part_of
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.metrics import k3_terms, pair_metrics
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.stats.tails import (
    ALL_MAY_LACK,
    ErrorTail,
    error_tail,
    most_pareto_k,
    pareto_k,
    prompt_tail,
    scale_tail,
)

K_HAT_OF_PSIS = 0.8796286463617515
"""By `psislw` of arviz-stats 0.8.0, of the weights in the test."""

NORMAL, STUDENT = TailDesign(math.inf, 0.01), TailDesign(3, 0.01)


def tail(values: np.ndarray, most: float = 5.0) -> ErrorTail:
    found = error_tail(values, lambda terms: terms.reshape(-1, 100).sum(axis=1), most)
    assert found is not None
    return found


def test_the_shape_of_a_student_t_tail_is_one_over_its_degrees() -> None:
    random = np.random.default_rng(1)
    for degrees in (3, 5):
        found = tail(np.abs(random.standard_t(degrees, 400_000)))
        assert found.shape == pytest.approx(1 / degrees, abs=3 * found.shape_error)


def test_what_may_be_added_holds_what_the_sample_is_expected_to_lack() -> None:
    random = np.random.default_rng(2)
    size, scale = 40_000, 0.03
    found = tail(scale * np.abs(random.standard_t(3, size)))
    first = scale * stats.t.isf(0.5 / size, 3)
    x = np.geomspace(first, 5.0, 20_000)
    lacks = float(np.trapezoid(k3_terms(x) * 2 * stats.t.pdf(x / scale, 3) / scale, x))
    assert found.rest(k3_terms, 0.9) > lacks


def test_a_normal_tail_adds_next_to_nothing() -> None:
    values = 0.01 * np.abs(np.random.default_rng(3).normal(size=40_000))
    assert tail(values).rest(k3_terms, 0.9) < 0.01 * k3_terms(values).mean()


def test_a_larger_sample_lacks_less() -> None:
    found = tail(0.01 * np.abs(np.random.default_rng(4).standard_t(3, 40_000)))
    rests = [found.rest(k3_terms, 0.9, times) for times in (1, 4, 16, 64)]
    assert rests == sorted(rests, reverse=True)
    assert rests[-1] < rests[0] / 4


def test_no_event_is_larger_than_the_clip() -> None:
    values = 0.3 * np.abs(np.random.default_rng(5).standard_t(2, 40_000))
    rests = [tail(np.minimum(values, most), most).rest(k3_terms, 0.9) for most in (2.0, 5.0)]
    assert rests[0] < k3_terms(np.array([2.0]))[0] * 100 / values.size
    assert rests[0] < rests[1]


@pytest.mark.parametrize(
    "values", [np.r_[np.zeros(9990), np.full(10, 0.1)], np.full(10_000, 0.1)], ids=["few", "alike"]
)
def test_values_without_a_shape_count_as_exponential(values: np.ndarray) -> None:
    found = tail(values)
    assert (found.scale, found.shape) == (0.1, 0.0)
    assert 0 < found.rest(np.abs, 0.9) < 0.01 * 0.1


def test_where_no_token_differs_there_is_no_tail() -> None:
    assert error_tail(np.zeros(100), lambda terms: terms, 5.0) is None


def test_log_normal_prompts_beyond_a_value_add_what_the_integral_says() -> None:
    found = prompt_tail(np.exp(0.8 * np.random.default_rng(6).normal(size=20_000)))
    assert found.sd_log == pytest.approx(0.8, rel=0.05)
    level = stats.norm.isf(ALL_MAY_LACK / 20_000)
    x = np.linspace(level, 12, 100_000)
    beyond = np.trapezoid((np.exp(0.8 * x) - math.exp(0.8 * level)) * stats.norm.pdf(x), x)
    assert beyond < found.rest() < 1.5 * beyond


@pytest.mark.slow
def test_prompts_that_err_more_than_the_samples_add_what_an_exponential_of_their_errors_says() -> None:
    random = np.random.default_rng(9)
    num_prompts, scale, sd = 2000, 0.1, 0.8
    prompt = np.repeat(np.arange(num_prompts), 200)
    scales = scale * np.exp(sd * random.normal(size=num_prompts))
    found = scale_tail(scales[prompt] * np.abs(random.normal(size=prompt.size)), prompt, num_prompts)
    level = stats.norm.isf(ALL_MAY_LACK / num_prompts)
    x = np.linspace(level, 9, 2000)
    noise = np.abs(stats.norm.ppf((np.arange(4000) + 0.5) / 4000))
    means = np.expm1(np.minimum(scale * np.exp(sd * x)[:, None] * noise, 5.0)).mean(axis=1)
    beyond = float(np.trapezoid((means - means[0]) * stats.norm.pdf(x), x))
    assert beyond < found.rest(np.expm1, 5.0) < 3 * beyond
    assert found.rest(np.expm1, 5.0, times=16) < beyond


def test_of_prompts_that_err_alike_no_scale_adds_anything() -> None:
    prompt = np.repeat(np.arange(64), 200)
    found = scale_tail(0.1 * np.abs(np.random.default_rng(10).normal(size=prompt.size)), prompt, 64)
    assert found.rest(np.expm1, 5.0) < 5e-3 * np.expm1(0.1)
    assert scale_tail(np.zeros(prompt.size), prompt, 64).rest(np.expm1, 5.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("token_mult_prob_error", 1.0), ("kl_k3", 0.0)])
def test_where_a_prompt_in_a_thousand_decides_the_bound_holds_the_truth(name: str, least: float) -> None:
    design = TailDesign(math.inf, 0.1, "log-normal", between=1.0)
    terms = {"token_mult_prob_error": lambda d: np.expm1(np.abs(d)), "kl_k3": k3_terms}[name]
    truth = least + expectation(design, terms, CLIP)
    below = 0
    for seed in range(60):
        pair = part_of(draw(design, 256, 1, np.random.default_rng([23, 256, 1, seed])))
        assert pair is not None
        bound = pair_metrics(replace(pair, clip=CLIP), names=[name])[0][name].tail_bound
        assert bound is not None
        below += bound < truth
    assert below <= 2


def test_prompts_that_are_alike_add_nothing_and_single_ones_as_often_as_all_may_lack_them() -> None:
    assert prompt_tail(np.full(64, 0.3)).rest() == pytest.approx(0, abs=1e-12)
    assert prompt_tail(np.r_[np.zeros(62), 0.1, 0.2]).rest() == pytest.approx(0.2 * ALL_MAY_LACK / 64)


def test_the_tail_of_student_t_errors_is_open_and_that_of_normal_ones_is_not() -> None:
    for design, is_open in ((NORMAL, False), (STUDENT, True)):
        for seed in range(5):
            pair = part_of(draw(design, 64, 4, np.random.default_rng(seed)))
            assert pair is not None
            assert pair_metrics(pair, names=["kl_k3"])[0]["kl_k3"].tail_is_open == is_open, (design, seed)


@pytest.mark.parametrize("is_rare", [True, False])
def test_a_share_holds_the_prompts_it_may_lack_on_the_side_of_the_rarer_kind(is_rare: bool) -> None:
    random = np.random.default_rng(7)
    sequences = Sequences.of_lengths(np.full(64, 100))
    chances = np.minimum(0.01 * np.exp(random.normal(size=64)), 1)
    mask = random.random(sequences.num_tokens) < sequences.spread(chances)
    share = Estimator(sequences).share(mask if is_rare else ~mask, "token")
    assert share.low is not None
    assert share.high is not None
    assert share.tail_bound is not None
    beyond = share.tail_bound - share.high if is_rare else share.low - share.tail_bound
    assert 0 < beyond <= ALL_MAY_LACK / 64


def test_a_mean_of_exponentials_is_never_bounded_below_its_least() -> None:
    random = np.random.default_rng(8)
    sequences = Sequences.of_lengths(np.full(6, 20))
    log_mu = np.full(sequences.num_tokens, -3.0)
    diff = np.where(np.arange(log_mu.size) < 20, random.normal(size=log_mu.size), 0.0)
    error = pair_metrics(TokenPair(sequences, log_mu + diff, log_mu))[0]["token_mult_prob_error"]
    assert error.low is not None
    assert error.low >= 1


def test_pareto_k_is_that_of_psis() -> None:
    log_weights = np.random.default_rng(5).standard_t(4, size=400)
    assert pareto_k(log_weights) == pytest.approx(K_HAT_OF_PSIS, rel=1e-12)
    assert pareto_k(log_weights - 900) == pytest.approx(K_HAT_OF_PSIS, rel=1e-6)


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_pareto_k_estimates_the_shape_of_a_pareto_tail(shape: float) -> None:
    random = np.random.default_rng(1)
    estimates = [pareto_k(np.log1p(stats.genpareto.rvs(shape, size=20_000, random_state=random))) for _ in range(8)]
    assert np.mean(np.asarray(estimates, dtype=np.float64)) == pytest.approx(shape, abs=0.08)


@pytest.mark.parametrize("log_weights", [np.zeros(400), np.arange(20.0), np.repeat([0.0, 1.0], [397, 3])])
def test_weights_without_a_tail_have_no_pareto_k(log_weights: Floats) -> None:
    assert pareto_k(log_weights) is None


def test_a_candidate_rate_of_exactly_0_is_an_exponential_tail() -> None:
    """As for a tail of 100 equal weights."""
    k_hat = pareto_k(np.repeat([0.0, 1.0], [990, 100]))
    assert k_hat is not None
    assert math.isfinite(k_hat)


def test_fewer_weights_bear_a_lighter_tail_only() -> None:
    assert [most_pareto_k(number) for number in (100, 1000, 10**6)] == pytest.approx([0.5, 2 / 3, 0.7])


def test_the_weights_of_heavy_tailed_responses_are_above_the_limit_and_those_of_rounding_below() -> None:
    random = np.random.default_rng(3)
    sequences = Sequences.of_lengths(np.full(400, 50))
    log_mu = np.full(sequences.num_tokens, -2.0)
    for sums, is_above in ((random.normal(size=400) * 0.05, False), (random.standard_t(2, size=400) * 3, True)):
        pair = TokenPair(sequences, log_mu + sequences.spread(sums / 50), log_mu)
        k_hat = pair_metrics(pair, names=["pareto_k_seq"])[0]["pareto_k_seq"]
        assert (k_hat.value > most_pareto_k(k_hat.num_sequences)) == is_above
