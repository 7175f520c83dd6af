"""Do both sides use one temperature? Told from log-probs and entropies, on distributions that are known."""

from collections.abc import Iterator

import numpy as np
import pytest

from mismatch_probe.guards.departure_totals import TemperatureTotals
from mismatch_probe.stats.sequences import Floats
from tests.guards.test_surprise import policy

LIMITS = (0.9, 1.1)
VOCABULARY = 50
LOGIT_ERROR = 0.05
"""Of a large logit in BF16."""


def batches(num_tokens: int, sharpness: float, temperature: float, number: int) -> Iterator[tuple[Floats, ...]]:
    """d, log pi, H and the number of the prompt, each its own, of tokens drawn from mu at `temperature`, whose logits
    err; larger `sharpness`, less entropy.
    """
    random = np.random.default_rng([num_tokens, int(100 * sharpness), int(100 * temperature)])
    rows = np.arange(num_tokens)
    for _ in range(number):
        logits = sharpness * random.standard_normal((num_tokens, VOCABULARY))
        noise = LOGIT_ERROR * random.standard_normal(logits.shape)
        (log_pi, pi), (log_mu, mu) = policy(logits), policy((logits + noise) / temperature)
        drawn = (mu.cumsum(axis=1) > random.random((num_tokens, 1))).argmax(axis=1)
        entropy = -(pi * log_pi).sum(axis=1)
        yield log_pi[rows, drawn] - log_mu[rows, drawn], log_pi[rows, drawn], entropy, rows


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [2, 6, 12, 40])
@pytest.mark.parametrize(("num_tokens", "number"), [(16, 400), (64, 400), (512, 200)])
def test_one_temperature_is_almost_never_beyond_the_limits(num_tokens: int, number: int, sharpness: float) -> None:
    """The guard asks for two steps in a row. Of many tokens hardly any fit comes near the limits."""
    fits = [TemperatureTotals.of(*batch).ratio for batch in batches(num_tokens, sharpness, 1.0, number)]
    assert np.mean([not LIMITS[0] <= fit <= LIMITS[1] for fit in fits]) <= 0.02


@pytest.mark.parametrize("temperature", [0.8, 1.25])
@pytest.mark.parametrize("sharpness", [2, 6, 12])
def test_two_temperatures_are_beyond_them(sharpness: float, temperature: float) -> None:
    fits = [TemperatureTotals.of(*batch).ratio for batch in batches(1000, sharpness, temperature, 5)]
    assert all(not LIMITS[0] <= fit <= LIMITS[1] for fit in fits)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 4, 32])
def test_copies_of_a_prompt_s_response_say_no_more_than_one(copies: int) -> None:
    """As samples of a sure policy are: each token's error comes again in every one of them."""
    alone, several = [], []
    for batch in batches(64, 12, 1.0, 100):
        again = [np.tile(column, copies) for column in batch]
        alone.append(TemperatureTotals.of(*batch).ratio)
        several.append(TemperatureTotals.of(*again).ratio)
    assert several == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(("prompts", "seen"), [(1, False), (32, True)])
def test_another_temperature_shows_in_several_prompts(prompts: int, seen: bool) -> None:
    [(diff, log_pi, entropy, rows)] = batches(640, 6, 0.8, 1)
    fit = TemperatureTotals.of(diff, log_pi, entropy, rows % prompts).ratio
    assert (not LIMITS[0] <= fit <= LIMITS[1]) is seen
