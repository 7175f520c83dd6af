"""Few prompts, unlike prompts, one giant among them: intervals that say how little they know."""

import numpy as np
import pytest

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, leverage_degrees, log_normal_reach, log_variance
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair

REPEATS = 600
ALPHA = 0.05


def test_clusters_alike_leave_one_degree_less_than_their_number_and_one_giant_leaves_one() -> None:
    assert leverage_degrees(np.full(9, 7.0)) == pytest.approx(8)
    assert leverage_degrees(np.array([5000.0, *np.ones(20)])) == pytest.approx(1, abs=0.01)
    assert 8 < leverage_degrees(np.random.default_rng(0).lognormal(5, 0.5, 32)) < 31
    assert leverage_degrees(np.array([3.0])) == 1


def test_the_spread_of_clusters_that_agree_or_have_no_value_is_none() -> None:
    assert log_variance(np.full(8, 2.0), 2.0) == 0
    assert log_variance(np.full(8, np.nan), 1.0) == 0
    assert log_variance(np.zeros(8), 0.0) == 0


def test_the_reach_of_log_normal_clusters_grows_with_their_spread_and_shrinks_with_their_number() -> None:
    few, many = ([log_normal_reach(0.2, spread, degrees, 0.9) for spread in (0.0, 0.5, 2.0)] for degrees in (7, 255))
    assert few[0] == many[0] == pytest.approx(0.2)
    assert few == sorted(few)
    assert many == sorted(many)
    assert few[2] > 2 * many[2]


def prompt_means(num_prompts: int, random: np.random.Generator, spread: float = 1.0) -> Floats:
    """The mean square of each prompt's tokens, of mean 1 over prompts, log-normal as where scales differ."""
    return random.lognormal(-(spread**2) / 2, spread, num_prompts)


def bounded(values: Floats, responses: Ints) -> Estimate:
    """The mean over responses, so many to each prompt."""
    prompts = np.repeat(np.arange(values.size), responses)
    estimator = Estimator(Sequences.of_lengths(np.ones(prompts.size, dtype=int), prompts), 1 - 2 * ALPHA)
    mean = estimator.mean(values[prompts], "sequence", Scale.POSITIVE)
    assert mean is not None
    return mean


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [2, 8, 16, 32, 64])
def test_the_upper_bound_of_few_unlike_prompts_lies_below_the_truth_as_rarely_as_it_says(num_prompts: int) -> None:
    random = np.random.default_rng(num_prompts)
    estimates = [bounded(prompt_means(num_prompts, random), np.ones(num_prompts, dtype=int)) for _ in range(REPEATS)]
    below = np.mean([estimate.high is not None and estimate.high < 1 for estimate in estimates])
    assert below <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / REPEATS)


def test_the_jackknife_alone_would_lie_below_far_more_often() -> None:
    random = np.random.default_rng(8)
    below = 0
    for _ in range(REPEATS):
        values = prompt_means(8, random)
        below += values.mean() * np.exp(1.895 * values.std(ddof=1) / np.sqrt(8) / values.mean()) < 1
    assert below / REPEATS > 2 * ALPHA


@pytest.mark.slow
def test_one_giant_prompt_among_many_is_nearly_no_evidence() -> None:
    random = np.random.default_rng(1)
    responses = np.array([300, *[1] * 31])
    estimates = [bounded(prompt_means(32, random), responses) for _ in range(REPEATS)]
    assert np.mean([estimate.low is not None and estimate.low > 1 for estimate in estimates]) <= ALPHA
    assert np.mean([estimate.high is not None and estimate.high < 1 for estimate in estimates]) <= ALPHA


@pytest.mark.parametrize(("num_prompts", "samples"), [(1, 1), (1, 8), (2, 1), (2, 8), (3, 1)])
def test_a_tiny_sample_has_every_metric_and_no_bound_that_is_no_number(num_prompts: int, samples: int) -> None:
    random = np.random.default_rng(num_prompts)
    sequences = Sequences.of_lengths(
        np.full(num_prompts * samples, 1 + num_prompts), np.repeat(np.arange(num_prompts), samples)
    )
    log_mu = -random.exponential(1, sequences.num_tokens)
    pair = TokenPair(sequences, log_mu + random.normal(0, 0.1, sequences.num_tokens), log_mu)
    for name, estimate in pair_metrics(pair)[0].items():
        assert estimate.num_prompts == num_prompts
        if estimate.low is not None and estimate.high is not None:
            assert estimate.low <= estimate.value <= estimate.high, name
        if num_prompts == 1:
            assert estimate.low is None, name


def test_equal_values_are_certain_of_themselves() -> None:
    sequences = Sequences.of_lengths(np.full(16, 4))
    pair = TokenPair(sequences, np.full(64, -1.0), np.full(64, -1.25))
    estimate = pair_metrics(pair)[0]["abs_logprob_diff"]
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((0.25, 0.25, 0.25))
