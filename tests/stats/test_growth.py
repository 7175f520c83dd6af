"""Growth of the KL over steps is named where it is there, and of a flat noisy log never."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.stats.growth import ResponseSums, StepLevels, can_show_growth, growth_of_sums, step_growth
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair

RESPONSES = 12
LOGS = 40


def log(sizes: Sequence[float], seed: int = 0, *, responses: int = RESPONSES, heavy: bool = False) -> TokenPair:
    """A log with a step for each of `sizes`, the standard deviation of d (nats)."""
    rng = np.random.default_rng(seed)
    num_responses = len(sizes) * responses
    lengths = rng.integers(10, 60, num_responses)
    sequences = replace(Sequences.of_lengths(lengths), steps=np.repeat(np.arange(len(sizes)), responses))
    num_tokens = sequences.num_tokens
    noise: Floats = rng.standard_t(2.5, num_tokens) if heavy else rng.standard_normal(num_tokens)
    of_responses = np.exp(0.5 * rng.standard_normal(num_responses))
    log_mu = -0.2 - rng.exponential(1.0, num_tokens)
    diff = noise * sequences.spread(np.repeat(sizes, responses) * of_responses)
    return TokenPair(sequences, np.minimum(log_mu + diff, 0.0), log_mu)


def test_a_kl_that_grows_each_step_is_named_with_its_ends_and_its_ratio() -> None:
    growth = step_growth(log([0.01 * 2**step for step in range(8)]), 0.95)
    assert growth is not None
    assert (growth.first_step, growth.last_step) == (0, 7)
    assert growth.ratio is not None
    assert growth.ratio.value == pytest.approx(growth.last.value / growth.first.value)
    assert growth.ratio.low is not None
    assert growth.ratio.low > 1000
    assert growth.steepest_step is None
    assert growth.p_value < 1e-10


@pytest.mark.parametrize("at", [1, 5, 7])
def test_the_step_that_makes_most_of_the_growth_is_named(at: int) -> None:
    growth = step_growth(log([0.01] * at + [1.0] * (8 - at)), 0.95)
    assert growth is not None
    assert (growth.step_before, growth.steepest_step) == (at - 1, at)
    assert growth.steepest_ratio is not None
    assert growth.steepest_ratio > 1000


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("num_steps", [2, 3, 8, 40])
def test_a_flat_noisy_log_does_not_grow(num_steps: int, heavy: bool) -> None:
    grown = [step_growth(log([0.05] * num_steps, seed, heavy=heavy), 0.95) for seed in range(LOGS)]
    assert grown == [None] * LOGS


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [3, 8, 40])
def test_steps_that_scatter_more_than_their_responses_do_not_grow(num_steps: int) -> None:
    rng = np.random.default_rng(1)
    logs = [log(0.05 * np.exp(0.3 * rng.standard_normal(num_steps)), seed) for seed in range(LOGS)]
    assert sum(step_growth(each, 0.95) is not None for each in logs) <= 1


def test_sums_of_a_log_grow_to_the_kl_that_its_tokens_give() -> None:
    """Tokens that pi holds for impossible among them."""
    pair = log([0.01] * 4 + [1.0] * 4)
    pair.log_pi[-40:] -= 45
    sums = ResponseSums.of(pair, pair.sequences.steps)
    growths = [growth_of_sums(sums, 0.95), step_growth(pair, 0.95)]
    of_sums, of_tokens = (growth.last.value for growth in growths if growth is not None)
    assert of_sums == pytest.approx(of_tokens, rel=1e-9)
    assert of_sums > 1


def test_a_step_that_comes_back_is_no_growth() -> None:
    assert step_growth(log([0.01] * 4 + [1.0] + [0.01] * 4), 0.95) is None


def test_a_kl_that_falls_is_no_growth() -> None:
    assert step_growth(log([0.01 * 2**step for step in range(8)][::-1]), 0.95) is None


def test_one_token_far_off_in_the_last_step_is_no_growth() -> None:
    pair = log([0.02] * 8)
    log_pi = pair.log_pi.copy()
    log_pi[-1] = -15.0
    assert step_growth(replace(pair, log_pi=log_pi), 0.95) is None


def test_a_growth_that_is_small_leads_nothing() -> None:
    assert step_growth(log(np.linspace(0.05, 0.06, 8), responses=100), 0.95) is None


@pytest.mark.parametrize(("times", "is_named"), [(2.2, False), (5.0, True)])
def test_of_two_steps_a_tenfold_kl_is_asked_for(times: float, is_named: bool) -> None:
    """A factor of d is its square in the KL."""
    growth = step_growth(log([0.05, 0.05 * times], responses=40), 0.95)
    assert (growth is not None) == is_named


def test_a_log_that_begins_with_equal_sides_grows_from_0() -> None:
    growth = step_growth(log([0.0, 0.0, 0.0, 0.1, 0.1, 0.1]), 0.95)
    assert growth is not None
    assert (growth.first.value, growth.ratio, growth.steepest_step) == (0.0, None, None)


def test_ends_are_widened_where_a_step_has_one_prompt() -> None:
    """The responses to one prompt have no interval; four steps have one of four prompts."""
    pair = log([0.01 * 1.4**step for step in range(20)])
    assert pair.sequences.steps is not None
    one_prompt = replace(pair, sequences=replace(pair.sequences, clusters=pair.sequences.steps))
    growth = step_growth(one_prompt, 0.95)
    assert growth is not None
    assert (growth.first_step, growth.first_up_to, growth.last_from, growth.last_step) == (0, 3, 16, 19)


def test_responses_without_a_step_are_left_out() -> None:
    pair = log([0.01, 1.0])
    steps = pair.sequences.steps
    assert steps is not None
    unknown = replace(pair, sequences=replace(pair.sequences, steps=np.where(steps == 0, -1, steps)))
    assert step_growth(unknown, 0.95) is None
    assert step_growth(replace(pair, sequences=replace(pair.sequences, steps=None)), 0.95) is None


def test_sums_of_responses_show_the_growth_that_the_tokens_show() -> None:
    pair = log([0.01 * 2**step for step in range(8)])
    assert pair.sequences.steps is not None
    sums = ResponseSums.of(pair, pair.sequences.steps)
    parts = [
        ResponseSums(*(column[sums.steps == step] for column in (sums.steps, sums.prompts, sums.k3, sums.tokens)))
        for step in range(8)
    ]
    of_sums, of_tokens = growth_of_sums(ResponseSums.join(parts), 0.95), step_growth(pair, 0.95)
    assert of_sums is not None
    assert of_tokens is not None
    assert (of_sums.p_value, of_sums.rank_correlation) == (of_tokens.p_value, of_tokens.rank_correlation)
    for name in ("first", "last"):
        mine, its = getattr(of_sums, name), getattr(of_tokens, name)
        assert (mine.value, mine.low, mine.high) == pytest.approx((its.value, its.low, its.high), rel=1e-12)


@pytest.mark.parametrize(("num_steps", "responses", "can"), [(2, 2, False), (2, 8, True), (5, 1, False), (7, 1, True)])
def test_few_responses_can_show_no_growth(num_steps: int, responses: int, can: bool) -> None:
    steps = np.repeat(np.arange(num_steps), responses)
    assert can_show_growth(steps, np.arange(steps.size)) == can


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        ([1e-4, 2e-4, 1.5e-4], True),
        ([1e-4, 4e-4, 1.5e-4], False),
        ([1e-4] * 40, True),
        ([1e-4] * 39 + [1.1e-3], False),
        ([1e-4] * 20 + [5e-4] * 20, False),
        ([0.0, 0.0], True),
        ([0.0, 1e-9], False),
    ],
)
def test_a_course_is_flat_where_no_part_and_no_step_stands_out(values: list[float], is_flat: bool) -> None:
    levels = StepLevels(range(len(values)), values, [100] * len(values))
    assert levels.is_flat == is_flat


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [3, 8, 40])
def test_noise_alone_is_flat_nearly_always(num_steps: int) -> None:
    flat = 0
    for seed in range(LOGS):
        pair = log([0.05] * num_steps, seed)
        assert pair.sequences.steps is not None
        sums = ResponseSums.of(pair, pair.sequences.steps)
        k3, tokens = np.bincount(sums.steps, sums.k3), np.bincount(sums.steps, sums.tokens)
        flat += StepLevels(range(num_steps), (k3 / tokens).tolist(), tokens.tolist()).is_flat
    assert flat >= 0.9 * LOGS
