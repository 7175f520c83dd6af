import numpy as np
import pytest
from scipy.stats import entropy

from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.stats.subsamples import divergences, full_vocabulary_check

Check = tuple[Sequences, np.ndarray, np.ndarray, np.ndarray]


def sampled_positions(noise: float, sample_from_pi: bool = False) -> Check:
    """Real categorical policies over 50 tokens at 20,000 positions: tokens sampled, KL and total variation exact."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (20_000, 50))
    moved = logits + noise * random.normal(size=logits.shape)
    log_mu, log_pi = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (logits, moved))
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    drawn = pi if sample_from_pi else mu
    tokens = (drawn.cumsum(axis=1) > random.random((20_000, 1))).argmax(axis=1)
    rows = np.arange(20_000)
    diff = log_pi[rows, tokens] - log_mu[rows, tokens]
    kl, tv = (mu * (log_mu - log_pi)).sum(axis=1), np.abs(mu - pi).sum(axis=1) / 2
    return Sequences.of_lengths(np.full(200, 100)), diff, kl, tv


@pytest.mark.slow
def test_tokens_sampled_from_mu_agree_with_the_whole_vocabulary():
    check = full_vocabulary_check(*sampled_positions(noise=0.05))
    assert set(check.estimators) == {"kl_k1", "kl_k2", "kl_k3", "tv"}
    assert all(estimator.agrees for estimator in check.estimators.values())
    assert check.estimators["kl_k3"].sampled.value == pytest.approx(check.full_kl.value, rel=0.05)
    assert check.estimators["tv"].sampled.value == pytest.approx(check.full_tv.value, rel=0.05)


@pytest.mark.slow
def test_tokens_sampled_from_the_wrong_side_are_found_out():
    check = full_vocabulary_check(*sampled_positions(noise=0.3, sample_from_pi=True))
    assert not check.estimators["kl_k1"].agrees


@pytest.mark.slow
def test_log_probs_of_other_tokens_are_found_out():
    sequences, diff, kl, tv = sampled_positions(noise=0.05)
    check = full_vocabulary_check(sequences, diff + np.random.default_rng(1).normal(0, 0.05, diff.size), kl, tv)
    assert not check.estimators["kl_k3"].agrees
    assert not check.estimators["tv"].agrees


def test_equal_policies_agree_at_zero():
    zeros = np.zeros(300)
    check = full_vocabulary_check(Sequences.of_lengths([100, 200]), zeros, zeros, zeros)
    assert check.full_kl.value == check.full_tv.value == 0
    assert all(estimator.agrees for estimator in check.estimators.values())


@pytest.mark.slow
def test_a_missing_position_is_refused():
    sequences, diff, kl, tv = sampled_positions(noise=0.05)
    with pytest.raises(ValueError, match="full_kl"):
        full_vocabulary_check(sequences, diff, kl[:-1], tv)
    with pytest.raises(ValueError, match="diff"):
        full_vocabulary_check(sequences, np.where(diff == diff[0], np.nan, diff), kl, tv)


@pytest.mark.slow
def test_a_negative_divergence_is_refused():
    sequences, diff, kl, tv = sampled_positions(noise=0.05)
    with pytest.raises(ValueError, match="negative"):
        full_vocabulary_check(sequences, diff, kl - 1, tv)


def random_policies(seed: int, spread: float = 2.0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, spread, (30, 17))
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def test_divergences_are_those_of_scipy():
    log_mu, log_pi = random_policies(0), random_policies(1)
    kl, tv = divergences(log_mu, log_pi)
    np.testing.assert_allclose(kl, entropy(np.exp(log_mu), np.exp(log_pi), axis=1), rtol=1e-12)
    np.testing.assert_allclose(tv, np.abs(np.exp(log_mu) - np.exp(log_pi)).sum(axis=1) / 2, rtol=1e-12)


def test_equal_policies_have_no_divergence():
    kl, tv = divergences(random_policies(0), random_policies(0))
    assert (kl == 0).all()
    assert (tv == 0).all()


def test_a_constant_that_a_log_softmax_misses_is_not_divergence():
    kl, tv = divergences(random_policies(0), random_policies(0) - 0.005)
    np.testing.assert_allclose([kl, tv], 0, atol=1e-15)


def test_a_token_that_cannot_be_sampled_adds_nothing_and_one_that_pi_excludes_is_infinite():
    log_mu, log_pi = random_policies(0), random_policies(1)
    cut = log_mu.copy()
    cut[:, 3] = -np.inf
    cut_normal = np.delete(cut, 3, axis=1)
    cut_normal -= np.logaddexp.reduce(cut_normal, axis=1, keepdims=True)
    expected = (np.exp(cut_normal) * (cut_normal - np.delete(log_pi, 3, axis=1))).sum(axis=1)
    np.testing.assert_allclose(divergences(cut, log_pi)[0], expected, rtol=1e-12)
    assert np.isinf(divergences(log_pi, cut)[0]).all()


def test_a_missing_log_prob_spoils_its_position_alone():
    log_mu = random_policies(0)
    log_mu[4, 2] = np.nan
    kl, tv = divergences(log_mu, random_policies(1))
    assert np.flatnonzero(np.isnan(kl)).tolist() == np.flatnonzero(np.isnan(tv)).tolist() == [4]


def test_vocabularies_of_different_size_are_refused():
    with pytest.raises(ValueError, match="log-probs of mu"):
        divergences(random_policies(0), random_policies(1)[:, :-1])
