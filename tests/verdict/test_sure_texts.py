"""Texts of which the model is sure: places show there too, and a change of sureness is none."""

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.verdict.signatures.places import onset_of, period, period_of
from mismatch_probe.verdict.signatures.profile import Disagreement, sizes_of
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


@pytest.mark.parametrize("seed", range(3))
def test_the_side_shows_at_unsure_tokens_though_most_tokens_of_a_period_are_sure(seed: int) -> None:
    """What an engine records falls at unsure tokens alone, by more than half a nat."""
    random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.full(40, 128))
    lengths = random.integers(40, 90, 40)
    is_at = (sequences.positions + sequences.spread(lengths)) % 16 == 5
    unsure = np.where(random.random(is_at.size) < 0.2, 0.6, 10 ** -random.uniform(2, 3, is_at.size))
    log_pi = np.log1p(-unsure)
    fall = unsure * np.where(is_at, random.gamma(4.0, 0.5, is_at.size), 0.02 * random.standard_normal(is_at.size))
    pair = TokenPair(sequences, log_pi=log_pi, log_mu=np.minimum(log_pi - fall, -1e-9))
    cause = period(Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=lengths))
    assert cause is not None
    assert cause.sentence.startswith("The engine errs once in every 16 places")


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_of_unsure_tokens_alone_is_named_in_a_sure_text(seed: int) -> None:
    """Sure tokens at the phase show nothing, and hide nothing."""
    random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.full(40, 160))
    lengths = random.integers(40, 90, 40)
    places = sequences.positions + sequences.spread(lengths)
    unsure = np.where(random.random(places.size) < 0.1, random.uniform(0.3, 0.9, places.size), 1e-3)
    rounding = 0.02 * unsure * random.standard_normal(places.size)

    def with_fault(is_at: np.ndarray) -> Disagreement:
        log_mu = np.log1p(-unsure)
        log_pi = np.minimum(log_mu + rounding - (is_at & (unsure > 0.1)) * random.exponential(0.6, places.size), -1e-9)
        pair = TokenPair(sequences, log_pi=log_pi, log_mu=log_mu)
        return Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=lengths)

    seams, step = period_of(with_fault(places % 16 == 5)), onset_of(with_fault(places >= 130))
    assert seams is not None
    assert (seams.block, seams.phase) == (16, 5)
    assert step is not None
    assert abs(step.place - 130) <= 4


@pytest.mark.parametrize("seed", range(3))
def test_zeros_of_a_coarse_log_softmax_hide_no_period_and_make_none(seed: int) -> None:
    """Of the tokens that the engine gives as 0 the other side shows how sure it is, which is no deviation."""
    random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.full(40, 160))
    own = sequences.positions
    sure = np.where(own % 16 == 3, 10 ** -random.uniform(2.5, 3.2, own.size), 10 ** -random.uniform(3.5, 5.5, own.size))
    unsure = np.where(random.random(own.size) < 0.15, random.uniform(0.2, 0.9, own.size), sure)

    def with_fault(is_at: np.ndarray, nats: float) -> Disagreement:
        log_mu = np.log1p(-unsure)
        diff = unsure * random.standard_normal(own.size) * np.where(is_at, nats, 0.02)
        log_pi = np.minimum(log_mu + diff, -1e-9)
        pair = TokenPair(sequences, log_pi=log_pi, log_mu=np.where(log_mu > -0.004, 0.0, log_mu))
        return Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=np.full(40, 60))

    assert period_of(with_fault(own < 0, 0.0)) is None
    seams = period_of(with_fault((own + 60) % 24 == 7, 2.0))
    assert seams is not None
    assert (seams.block, seams.phase) == (24, 7)


def mostly_with_same_bits(seed: int, share: float) -> tuple[np.random.Generator, Floats, Floats]:
    """Places in the context, and rounding of the logits of which so large a share is 0."""
    random, places, _ = texts(seed)
    rounding = 0.02 * random.standard_normal(places.size)
    return random, places, np.where(random.random(places.size) < share, 0.0, rounding)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_named_at_its_place_behind_one_where_the_text_grows_unsure(seed: int) -> None:
    random, places, rounding = mostly_with_same_bits(seed, 0.45)
    is_sure = places < 80
    unsure = np.where(is_sure, 10 ** -random.uniform(2, 4, places.size), random.uniform(0.02, 0.09, places.size))
    usual = 0.02 * random.standard_normal(places.size) * np.where(places >= 120, 12.0, 1.0)
    step = onset_of(of_texts(np.log1p(-unsure), unsure * np.where(is_sure, rounding, usual)))
    assert step is not None
    assert abs(step.place - 120) <= 4


def test_sizes_are_compared_among_tokens_as_sure() -> None:
    """The unsure tokens of a form round twice as far as others as unsure; most sure tokens hardly round at all."""
    random, places, rounding = mostly_with_same_bits(0, 0.48)
    is_at = places % 16 == 5
    is_unsure = is_at | (random.random(places.size) < 0.1)
    unsure = np.where(is_unsure, random.uniform(0.02, 0.09, places.size), 10 ** -random.uniform(2.5, 4, places.size))
    usual = 0.02 * random.standard_normal(places.size) * np.where(is_at, 2.0, 1.0)
    log = of_texts(np.log1p(-unsure), unsure * np.where(is_unsure, usual, rounding))
    sizes = next(sizes_of(log))
    assert 1.5 < sizes.times(is_at[sizes.mask]) < 2.7
    for kind in np.unique(sizes.kinds):
        assert abs(sizes.logs[sizes.kinds == kind].mean()) < 1e-9
    assert period_of(log) is None


def test_tokens_of_which_most_have_the_same_bits_show_no_size() -> None:
    random, places, rounding = mostly_with_same_bits(0, 0.6)
    is_sure = random.random(places.size) < 0.5
    unsure = np.where(is_sure, 10 ** -random.uniform(3.1, 3.4, places.size), random.uniform(0.02, 0.09, places.size))
    usual = 0.02 * random.standard_normal(places.size)
    sizes = next(sizes_of(of_texts(np.log1p(-unsure), unsure * np.where(is_sure, rounding, usual))))
    assert not sizes.mask[is_sure].any()
    assert sizes.mask[~is_sure].all()
