"""Do the tokens come from pi? Told from log-probs and entropies alone, on draws from distributions that are known."""

from collections.abc import Iterator

import numpy as np
import pytest

from mismatch_probe.guards.sums import SurpriseTotals
from mismatch_probe.stats.sequences import Floats

LIMIT = 0.02
VOCABULARY = 50


def batches(num_tokens: int, sharpness: float, temperature: float, number: int) -> Iterator[tuple[Floats, Floats]]:
    """log pi and H of tokens drawn at `temperature` from random distributions; larger `sharpness`, less entropy."""
    random = np.random.default_rng([num_tokens, int(100 * sharpness), int(100 * temperature)])
    for _ in range(number):
        logits = sharpness * random.standard_normal((num_tokens, VOCABULARY))
        log_pi, log_mu = (
            scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True)) for scaled in (logits, logits / temperature)
        )
        drawn = (np.exp(log_mu).cumsum(axis=1) > random.random((num_tokens, 1))).argmax(axis=1)
        entropy = -(np.exp(log_pi) * log_pi).sum(axis=1)
        yield log_pi[np.arange(num_tokens), drawn], entropy


@pytest.mark.parametrize("sharpness", [2, 6, 12, 40])
@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_tokens_drawn_from_pi_are_almost_never_beyond_the_limit(num_tokens: int, sharpness: float) -> None:
    beyond = [SurpriseTotals.of(*batch).excess > LIMIT for batch in batches(num_tokens, sharpness, 1.0, 400)]
    assert np.mean(beyond) <= 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("sharpness", [2, 6, 12])
def test_tokens_drawn_at_another_temperature_are_beyond_it(sharpness: float, temperature: float) -> None:
    assert all(SurpriseTotals.of(*batch).excess > LIMIT for batch in batches(4000, sharpness, temperature, 5))
