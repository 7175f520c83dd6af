"""Do the tokens come from pi? Told from log-probs and entropies alone, on draws from distributions that are known."""

from collections.abc import Iterator

import numpy as np
import pytest

from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.departure_totals import SurpriseTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.stats.sequences import Floats

LIMIT = 0.02
VOCABULARY = 50


def policy(logits: Floats) -> tuple[Floats, Floats]:
    """Log-probs and probabilities [T, V]."""
    weights = np.exp(logits)
    totals = weights.sum(axis=1, keepdims=True)
    return logits - np.log(totals), weights / totals


def batches(num_tokens: int, sharpness: float, temperature: float, number: int) -> Iterator[tuple[Floats, Floats]]:
    """log pi and H of tokens drawn at `temperature` from random distributions; larger `sharpness`, less entropy."""
    random = np.random.default_rng([num_tokens, int(100 * sharpness), int(100 * temperature)])
    for _ in range(number):
        logits = sharpness * random.standard_normal((num_tokens, VOCABULARY))
        log_pi, pi = policy(logits)
        _, mu = (log_pi, pi) if temperature == 1 else policy(logits / temperature)
        drawn = (mu.cumsum(axis=1) > random.random((num_tokens, 1))).argmax(axis=1)
        entropy = -(pi * log_pi).sum(axis=1)
        yield log_pi[np.arange(num_tokens), drawn], entropy


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [2, 6, 12, 40])
@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_tokens_drawn_from_pi_are_almost_never_beyond_the_limit(num_tokens: int, sharpness: float) -> None:
    beyond = [SurpriseTotals.of(*batch).excess > LIMIT for batch in batches(num_tokens, sharpness, 1.0, 400)]
    assert np.mean(beyond) <= 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("sharpness", [2, 6, 12])
def test_tokens_drawn_at_another_temperature_are_beyond_it(sharpness: float, temperature: float) -> None:
    assert all(SurpriseTotals.of(*batch).excess > LIMIT for batch in batches(4000, sharpness, temperature, 5))


def first_firing(num_tokens: int, sharpness: float, temperature: float, steps: int) -> int | None:
    """The step at which the default guard on the tokens fires."""
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "sampling"))
    for step, batch in enumerate(batches(num_tokens, sharpness, temperature, steps), start=1):
        totals = SurpriseTotals.of(*batch)
        if book.evaluate(step, {"mismatch/surprise_mean": totals.mean, "mismatch/surprise_error": totals.error}).events:
            return step
    return None


@pytest.mark.parametrize("sharpness", [2, 6, 12, 40])
@pytest.mark.parametrize("num_tokens", [16, 64, 512])
def test_the_guard_is_silent_in_a_hundred_steps_of_tokens_drawn_from_pi(num_tokens: int, sharpness: float) -> None:
    assert first_firing(num_tokens, sharpness, 1.0, 100) is None


def test_the_guard_adds_up_what_one_step_does_not_show() -> None:
    [(log_pi, entropy)] = batches(512, 6, 0.8, 1)
    assert SurpriseTotals.of(log_pi, entropy).excess < LIMIT
    fired = first_firing(512, 6, 0.8, 40)
    assert fired is not None
    assert fired > 2


@pytest.mark.slow
def test_many_tokens_of_a_sure_policy_show_a_hidden_temperature_at_once() -> None:
    assert first_firing(100_000, 40, 0.8, 2) == 2
