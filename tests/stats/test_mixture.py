import math

import numpy as np
import pytest

from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.stats.tails import Mixture, relative_rates

PER_TOKEN = 0.03


def columns(mixture: Mixture, drift: float, variance: float = 100.0) -> list[Floats]:
    sums, squares = drift * variance * mixture.rates, variance * mixture.rates
    return [column.sum(keepdims=True) for column in mixture.columns(sums, squares).T]


def pair(num_sequences: int, length: int, rates: Floats, bias: Floats | float = 0.0) -> TokenPair:
    """Normal errors of a variance of 0.0009 a token times the rate of each response, with E e^d = 1."""
    sequences = Sequences.of_lengths(np.full(num_sequences, length))
    scale = PER_TOKEN * sequences.spread(np.sqrt(rates))
    noise = np.random.default_rng(2).normal(size=sequences.num_tokens)
    log_mu = np.full(sequences.num_tokens, -30.0)
    shift = sequences.spread(np.broadcast_to(bias, num_sequences)) - scale**2 / 2
    return TokenPair(sequences, log_mu + scale * noise + shift, log_mu)


@pytest.mark.parametrize("drift", [-0.5, 0.0])
def test_responses_alike_lose_what_log_normal_weights_do(drift: float) -> None:
    mixture = Mixture(np.ones(500), 0.5)
    assert mixture.log_variance(columns(mixture, drift))[0] == pytest.approx(math.log(math.log(2)), abs=1e-3)


def test_a_tenth_at_nine_times_the_variance_loses_half_much_sooner() -> None:
    rates = np.where(np.arange(1000) < 100, 9.0, 1.0) / 1.8
    mixture = Mixture(rates, 0.5)
    found = math.exp(mixture.log_variance(columns(mixture, 0.0, 1000.0))[0])
    assert np.mean(np.exp(rates * found / 2)) ** 2 / np.mean(np.exp(2 * rates * found)) == pytest.approx(0.5, abs=0.01)
    assert found < 0.5 * math.log(2)


def test_the_noise_of_tokens_alone_makes_no_response_unlike() -> None:
    random = np.random.default_rng(1)
    counts = np.full((400, 3), 20.0)
    errors = random.normal(size=(400, 3, 20)) * np.array([1.0, 2.0, 0.5])[:, None]
    rates = relative_rates((errors**2).sum(axis=2), (errors**4).sum(axis=2), counts)
    assert rates.std() < 0.1
    unlike = errors * np.where(np.arange(400) < 40, 3.0, 1.0)[:, None, None]
    rates = relative_rates((unlike**2).sum(axis=2), (unlike**4).sum(axis=2), counts)
    assert rates[:40].mean() / rates[40:].mean() == pytest.approx(9, rel=0.2)


@pytest.mark.slow
def test_the_budget_of_unlike_responses_is_where_half_of_their_sample_is_left() -> None:
    rates = np.where(np.arange(2000) % 10 == 0, 9.0, 1.0)
    budget = length_law(pair(2000, 400, rates)).budget_tokens
    assert budget is not None
    assert budget.low is not None
    assert budget.high is not None
    loss = np.exp(rates * PER_TOKEN**2 * np.arange(1, 2000)[:, None]).mean(axis=1)
    truth = float(np.searchsorted(loss, 2.0)) + 1
    assert budget.low < truth < budget.high
    assert budget.high < math.log(2) / (1.8 * PER_TOKEN**2)


@pytest.mark.slow
def test_a_budget_inside_the_data_is_not_marked_and_one_of_skewed_responses_is() -> None:
    assert not length_law(pair(1000, 1000, np.ones(1000))).budget_tail_is_open
    skewed = 5e-4 * (np.random.default_rng(3).exponential(size=1000) - 1)
    assert length_law(pair(1000, 1000, np.full(1000, 0.4), skewed)).budget_tail_is_open
    assert length_law(pair(1000, 150, np.ones(1000))).budget_tail_is_open


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 400, 900])
@pytest.mark.parametrize("num_prompts", [256, 1024])
def test_a_budget_is_marked_where_few_prompts_err_ten_times_as_much(num_prompts: int, length: int) -> None:
    rates = np.where(np.random.default_rng(4).random(num_prompts) < 0.03, 100.0, 1.0) / 9
    law = length_law(pair(num_prompts, length, rates))
    assert law.budget_tokens is None or law.budget_tail_is_open
    assert law.budget_tokens is not None or num_prompts == 256
