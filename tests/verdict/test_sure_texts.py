"""Texts of which the model is sure: places show there too, and a change of sureness is none."""

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.verdict.signatures.places import onset_of, period_of
from mismatch_probe.verdict.signatures.profile import Disagreement
from tests.verdict.simulated import of_texts, texts

BF16 = Dtype.BF16


@pytest.mark.parametrize("nats", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_place_in_a_sure_text_is_named(seed: int, nats: float) -> None:
    random, places, log_mu = texts(seed)
    rounding = random.normal(0, 0.01, places.size) * -np.expm1(log_mu)
    is_off = (places >= 100) & (random.random(places.size) < 0.5)
    reading = onset_of(of_texts(log_mu, rounding - is_off * nats * random.exponential(1.0, places.size)))
    assert reading is not None
    assert abs(reading.place - 100) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_a_text_that_grows_unsure_at_a_place_has_none(seed: int) -> None:
    random, places, log_mu = texts(seed)
    log_mu = np.where(places < 100, log_mu, -random.gamma(1.0, 1.0, places.size) - 0.3)
    rounding = random.normal(0, 0.02, places.size) * -np.expm1(log_mu)
    assert onset_of(of_texts(log_mu, rounding)) is None
    assert period_of(of_texts(log_mu, rounding)) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_text_whose_sure_tokens_mostly_have_the_same_bits_and_that_grows_unsure_has_none(seed: int) -> None:
    random, places, log_mu = texts(seed)
    log_mu = np.where(places < 100, -(10 ** -random.uniform(2, 4, places.size)), -random.gamma(1.0, 1.0, places.size))
    has_same_bits = (log_mu > -0.01) & (random.random(places.size) < 0.45)
    rounding = random.normal(0, 0.02, places.size) * -np.expm1(log_mu)
    assert onset_of(of_texts(log_mu, np.where(has_same_bits, 0.0, rounding))) is None


@pytest.mark.parametrize("decimals", [3, 4, 5])
@pytest.mark.parametrize("grows_sure", [False, True])
def test_decimals_of_log_probs_are_no_step_where_a_text_grows_sure_or_unsure(
    decimals: int, *, grows_sure: bool
) -> None:
    for seed in range(6):
        random, places, _ = texts(seed)
        is_sure = (places < 100) != grows_sure
        log_mu = -np.where(is_sure, 10 ** -random.uniform(2, 5, places.size), random.gamma(0.7, 1.0, places.size))
        log_pi = np.minimum(log_mu + random.normal(0, 0.02, places.size) * -np.expm1(log_mu), -1e-9)
        log_mu, log_pi = np.round(log_mu, decimals), np.round(log_pi, decimals)
        assert onset_of(of_texts(log_mu, log_pi - log_mu)) is None
        assert period_of(of_texts(log_mu, log_pi - log_mu)) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_period_of_sure_tokens_is_named_behind_prompts_of_one_length(seed: int) -> None:
    """Of few tokens is the model unsure there, and these stand at other places."""

    def of_sure_texts(times: float) -> Disagreement:
        random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.full(24, 96))
        is_at = (60 + sequences.positions) % 24 == 5
        is_unsure = ~is_at & (random.random(is_at.size) < 0.03)
        unsure = np.where(is_unsure, 0.5, 10 ** -random.uniform(2.5, 4, is_at.size))
        log_mu = np.log1p(-unsure)
        diff = 0.02 * unsure * random.standard_t(5, is_at.size) * np.where(is_at, times, 1.0)
        log_mu, log_pi = (values.astype(np.float32) for values in (log_mu, np.minimum(log_mu + diff, -1e-9)))
        pair = TokenPair(sequences, log_pi=log_pi, log_mu=log_mu)
        return Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=np.full(24, 60))

    seams = period_of(of_sure_texts(20.0))
    assert seams is not None
    assert (seams.block, seams.phase) == (24, 5)
    assert seams.times > 10
    assert period_of(of_sure_texts(5.0)) is None, "a form may round so"
    assert period_of(of_sure_texts(1.0)) is None


def test_a_period_at_sure_tokens_is_named_where_only_two_prompts_have_unsure_ones() -> None:
    random = np.random.default_rng(0)
    sequences = Sequences.of_lengths(np.full(40, 256), np.arange(40))
    lengths = random.integers(40, 300, 40)
    rows = sequences.spread(np.arange(40))
    unsure = np.where(rows < 2, random.uniform(0.3, 0.9, rows.size), 10 ** -random.uniform(2, 3, rows.size))
    is_at = (sequences.positions + sequences.spread(lengths)) % 16 == 5
    diff = 0.005 * unsure * random.standard_normal(rows.size) * np.where(is_at, 40, 1)
    log_mu = np.log1p(-unsure)
    pair = TokenPair(sequences, log_pi=np.minimum(log_mu + diff, -1e-9), log_mu=log_mu)
    seams = period_of(Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=lengths))
    assert seams is not None
    assert (seams.block, seams.phase) == (16, 5)
