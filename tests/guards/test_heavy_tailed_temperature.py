"""A temperature where logits have heavy tails: the scale that log-probs show explains less of it than entropies do."""

import numpy as np
import pytest

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import EndCause
from mismatch_probe.stats.sequences import Floats


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def step(random: np.random.Generator, temperature: float) -> Batch:
    """The engine samples at `temperature` and reports just that."""
    shape = 32, 40, 64
    logits = random.standard_normal(shape) * np.exp(random.normal(0.9, 0.7, (*shape[:2], 1)))
    log_pi = log_softmax(logits)
    log_mu = log_softmax((logits + 0.01 * random.standard_normal(shape)) / temperature)
    tokens = (log_mu + random.gumbel(size=shape)).argmax(-1)[..., None]
    sides = (np.take_along_axis(side, tokens, -1)[..., 0] for side in (log_pi, log_mu))
    return Batch(*sides, True, entropy=-(np.exp(log_pi) * log_pi).sum(-1))


@pytest.mark.parametrize("temperature", [0.7, 0.8, 0.9, 1.25])
def test_what_the_engine_reports_is_not_called_hidden(temperature: float) -> None:
    random = np.random.default_rng(11)
    history = {number: step(random, temperature).measure().metrics() for number in (12, 13)}
    diagnosis = diagnose(history, [])
    assert diagnosis.cause is EndCause.TEMPERATURE
    assert "The two sides use different temperatures" in diagnosis.sentence
