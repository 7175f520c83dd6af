"""A temperature where logits have heavy tails: the scale that log-probs show explains less of it than entropies do."""

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnose import diagnose
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


def first_step(seed: int, *, reported: float = 1.0, drawn: float = 1.0, noise: float = 0.02) -> Batch:
    """Sides whose temperatures are pi's 1 and mu's `reported`; tokens drawn at `drawn` times mu's."""
    random = np.random.default_rng(seed)
    shape = 16, 32, 32
    logits = 3 * random.standard_normal(shape)
    log_pi = log_softmax(logits)
    scores = (logits + noise * random.standard_normal(shape)) / reported
    tokens = (log_softmax(scores / drawn) + random.gumbel(size=shape)).argmax(-1)[..., None]
    sides = (np.take_along_axis(side, tokens, -1)[..., 0] for side in (log_pi, log_softmax(scores)))
    return Batch(*sides, True, entropy=-(np.exp(log_pi) * log_pi).sum(-1), prompt_ids=np.arange(16) // 4)


@pytest.mark.parametrize("temperature", [0.7, 1.3, 2.3])
def test_a_temperature_is_named_in_a_runs_first_step(temperature: float) -> None:
    for seed in range(4):
        diagnosis = diagnose({1: first_step(seed, reported=temperature).measure().metrics()}, [])
        assert diagnosis.sentence.startswith("The two sides use different temperatures")


@pytest.mark.parametrize("temperature", [0.5, 2.3])
def test_tokens_drawn_from_what_no_column_records_are_called_hidden(temperature: float) -> None:
    for seed in range(0, 8, 2):
        steps = {step: first_step(seed + step, drawn=temperature).measure().metrics() for step in (1, 2)}
        assert diagnose(steps, []).sentence.startswith("The engine does not sample from the distribution")


@pytest.mark.parametrize("noise", [0.02, 1.0])
def test_neither_sound_sides_nor_other_weights_have_a_temperature_in_a_first_step(noise: float) -> None:
    for seed in range(4):
        diagnosis = diagnose({1: first_step(seed, noise=noise).measure().metrics()}, [])
        assert "temperatures" not in diagnosis.sentence


def test_surprise_beside_a_fit_of_another_temperature_is_no_hidden_sampling() -> None:
    seen = {"mismatch/surprise_mean": 0.5, "mismatch/surprise_error": 0.02, "mismatch/kl_k1": 0.08}
    followed, agree = (
        diagnose({step: seen | {"mismatch/temperature_fit": fit, "mismatch/scale_share": 0.2} for step in (1, 2)}, [])
        for fit in (1.4, 1.0)
    )
    assert "different temperatures" in followed.sentence
    assert "does not sample from the distribution" in agree.sentence
