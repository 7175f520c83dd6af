"""Every metric: zero when equal, growing with noise, equal to its closed form on Gaussian d, blind to order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair
from tests.stats.pairs import clustered_pair, gaussian_pair, pair_with

AT_EQUALITY = {
    **dict.fromkeys(("abs_logprob_diff", "logprob_diff_rms", "kl_k1", "kl_k2", "kl_k3", "prob_abs_diff"), 0.0),
    **dict.fromkeys(("chi2_token", "chi2_seq", "log_ppl_diff", "differs", "top1_flip", "kl_entropy_ratio"), 0.0),
    **dict.fromkeys(("prob_diff_extremes_max", "prob_diff_extremes_min", "abs_logprob_diff_p99"), 0.0),
    **dict.fromkeys(("outside_band_0.8_1.25", "outside_band_0.9_1.1", "outside_band_0.5_2", "outside_band_0.5_5"), 0.0),
    **dict.fromkeys(("ess_token", "ess_seq", "is_ratio_mean_token", "is_ratio_mean_seq", "ppl_ratio"), 1.0),
    **dict.fromkeys(("token_mult_prob_error", "prob_pearson", "bitwise_equal"), 1.0),
}

RISING = ("abs_logprob_diff", "logprob_diff_rms", "kl_k2", "kl_k3", "token_mult_prob_error")
FALLING = ("ess_token", "prob_pearson")


def values_of(pair: TokenPair) -> dict[str, float]:
    return {name: estimate.value for name, estimate in pair_metrics(pair)[0].items()}


def with_everything(pair: TokenPair) -> TokenPair:
    top1 = np.arange(pair.sequences.num_tokens, dtype=np.int32)
    entropy = np.linspace(0.1, 2, top1.size)
    return TokenPair(pair.sequences, pair.log_pi, pair.log_mu, top1_pi=top1, top1_mu=top1, entropy_pi=entropy)


def test_equal_log_probs_give_the_value_of_no_deviation():
    metrics, unavailable = pair_metrics(with_everything(pair_with(np.zeros(300), [100, 200])))
    assert {name: metrics[name].value for name in AT_EQUALITY} == AT_EQUALITY
    assert set(unavailable) == {"pareto_k_token", "pareto_k_seq"}


def test_every_metric_of_the_contract_is_there():
    metrics, unavailable = pair_metrics(with_everything(clustered_pair(32, seed=0)))
    assert set(AT_EQUALITY) <= set(metrics)
    assert {"abs_logprob_diff_p50", "abs_logprob_diff_p99_9", "abs_logprob_diff_max", "prob_abs_diff_std"} <= set(
        metrics
    )
    assert {"kl_k1_seq", "kl_k2_seq", "kl_k3_seq", "token_mult_prob_error_max", "prob_abs_diff_max"} <= set(metrics)
    assert not unavailable


def test_only_what_is_asked_for_is_computed_and_is_the_same():
    complete_pair, part = clustered_pair(32, seed=0), clustered_pair(32, seed=0)
    every, names = pair_metrics(complete_pair)[0], ("kl_k3", "ess_seq", "abs_logprob_diff_p99")
    assert pair_metrics(part, names=names) == ({name: every[name] for name in every if name in names}, {})
    assert "prob_pi" in vars(complete_pair)
    assert "prob_pi" not in vars(part)
    assert list(pair_metrics(part, names=["top1_flip"])[1]) == ["top1_flip"]


@pytest.mark.parametrize("name", [*RISING, *FALLING])
def test_more_noise_moves_the_metric_one_way(name: str):
    values = [values_of(gaussian_pair(32, 50, sigma))[name] for sigma in (0.001, 0.01, 0.1)]
    assert values == sorted(values, reverse=name in FALLING)
    assert len(set(values)) == 3


@pytest.mark.parametrize("sigma", [0.02, 0.2])
def test_gaussian_deviations_give_the_closed_forms(sigma: float):
    metrics, _ = pair_metrics(gaussian_pair(2000, 50, sigma))
    variance = sigma**2
    closed_forms = {
        "kl_k3": variance / 2,
        "kl_k1": variance / 2,
        "kl_k2": variance / 2 * (1 + variance / 4),
        "logprob_diff_rms": math.sqrt(variance + variance**2 / 4),
        "ess_token": math.exp(-variance),
        "chi2_token": math.expm1(variance),
        "is_ratio_mean_token": 1.0,
        "kl_k1_seq": 50 * variance / 2,
        "ppl_ratio": math.exp(variance / 2 + variance / 100),
    }
    for name, truth in closed_forms.items():
        estimate = metrics[name]
        assert estimate.low is not None
        assert estimate.high is not None
        width = estimate.high - estimate.low
        assert estimate.low - width / 2 < truth < estimate.high + width / 2, name


@pytest.mark.slow
def test_sequence_weights_of_gaussian_deviations_keep_exp_of_minus_the_variance():
    metrics, _ = pair_metrics(gaussian_pair(20_000, 25, 0.1))
    assert metrics["ess_seq"].value == pytest.approx(math.exp(-0.25), abs=0.02)


def test_k3_of_tiny_deviations_keeps_its_digits():
    pair = TokenPair(Sequences.of_lengths([2, 2]), np.array([1e-9, -1e-9, 1e-9, -1e-9]), np.zeros(4))
    metrics, _ = pair_metrics(pair)
    assert metrics["kl_k3"].value == pytest.approx(0.5e-18, rel=1e-6)
    assert metrics["ess_token"].low == pytest.approx(1.0)


def test_a_known_pair_gives_known_numbers():
    diff = np.log([1.0, 2.0, 0.5, 4.0])
    pair = TokenPair(Sequences.of_lengths([2, 2]), diff + np.log(0.1), np.full(4, np.log(0.1)))
    values = values_of(pair)
    assert values["is_ratio_mean_token"] == pytest.approx(7.5 / 4)
    assert values["ess_token"] == pytest.approx(7.5**2 / (4 * 21.25))
    assert values["is_ratio_mean_seq"] == pytest.approx(2.0)
    assert values["prob_diff_extremes_max"] == pytest.approx(0.3)
    assert values["prob_diff_extremes_min"] == pytest.approx(-0.05)
    assert values["outside_band_0.8_1.25"] == 0.75
    assert values["bitwise_equal"] == 0.25
    assert values["token_mult_prob_error"] == pytest.approx((1 + 2 + 2 + 4) / 4)
    assert values["token_mult_prob_error_max"] == pytest.approx(3)
    assert values["kl_k1"] == pytest.approx(-math.log(4) / 4)


def test_nothing_is_clamped_but_weights():
    log_mu = np.array([-30.0, 0.0, 0.0, 0.0])
    values = values_of(TokenPair(Sequences.of_lengths([2, 2]), np.zeros(4), log_mu))
    assert values["kl_k3"] == pytest.approx((math.exp(30) - 31) / 4)
    assert values["is_ratio_mean_token"] == pytest.approx((math.exp(20) + 3) / 4)


def test_an_overflowing_exponential_is_named_not_averaged():
    log_mu = np.array([-800.0, 0.0, 0.0, 0.0])
    metrics, unavailable = pair_metrics(TokenPair(Sequences.of_lengths([2, 2]), np.zeros(4), log_mu))
    assert "float64" in unavailable["kl_k3"]
    assert "kl_k3" not in metrics
    assert "ess_token" in metrics


def test_metrics_whose_leg_is_missing_are_named():
    metrics, unavailable = pair_metrics(clustered_pair(8, seed=1))
    assert set(unavailable) == {"top1_flip", "kl_entropy_ratio", "pareto_k_seq"}
    assert "fewer than five" in unavailable["pareto_k_seq"]
    assert not set(unavailable) & set(metrics)


def test_a_flipped_argmax_is_seen():
    pair = with_everything(clustered_pair(8, seed=1))
    assert pair.top1_mu is not None
    flipped = pair.top1_mu.copy()
    flipped[::4] += 1
    pair = TokenPair(pair.sequences, pair.log_pi, pair.log_mu, top1_pi=pair.top1_pi, top1_mu=flipped)
    assert values_of(pair)["top1_flip"] == pytest.approx(0.25, abs=0.01)


@st.composite
def small_pairs(draw: st.DrawFn) -> TokenPair:
    lengths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=6))
    clusters = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    finite = st.floats(-4, 4, allow_subnormal=False).map(lambda x: round(x, 6))
    diff = draw(st.lists(finite, min_size=sum(lengths), max_size=sum(lengths)))
    return pair_with(np.array(diff), lengths, clusters)


def shuffled(pair: TokenPair, order: np.ndarray) -> TokenPair:
    starts, lengths = pair.sequences.offsets[:-1], pair.sequences.lengths
    tokens = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order])
    sequences = Sequences.of_lengths(lengths[order], pair.sequences.clusters[order])
    return TokenPair(sequences, pair.log_pi[tokens], pair.log_mu[tokens])


def assert_same(first: dict[str, Estimate], second: dict[str, Estimate]) -> None:
    assert first.keys() == second.keys()
    for name, estimate in first.items():
        for field in ("value", "low", "high"):
            ours, theirs = getattr(estimate, field), getattr(second[name], field)
            assert (ours is None) == (theirs is None), name
            assert ours is None or ours == pytest.approx(theirs, rel=1e-6, abs=1e-9), (name, field)


@pytest.mark.slow
@given(small_pairs(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_sequences_changes_nothing(pair: TokenPair, random: object):
    order = np.random.default_rng(random.getrandbits(32)).permutation(pair.sequences.num_sequences)  # type: ignore[attr-defined]
    assert_same(pair_metrics(pair)[0], pair_metrics(shuffled(pair, order))[0])


@pytest.mark.slow
@given(small_pairs())
@settings(max_examples=50, deadline=None)
def test_cutting_sequences_in_two_changes_no_token_metric(pair: TokenPair):
    lengths, clusters = pair.sequences.lengths, pair.sequences.clusters
    pieces = [(part, c) for n, c in zip(lengths, clusters, strict=True) for part in (n // 2, n - n // 2) if part]
    cut = TokenPair(Sequences.of_lengths(*zip(*pieces, strict=True)), pair.log_pi, pair.log_mu)
    complete_pair = {name: e for name, e in pair_metrics(pair)[0].items() if e.by == "token"}
    split = {name: e for name, e in pair_metrics(cut)[0].items() if e.by == "token"}
    assert_same(complete_pair, {name: split[name] for name in complete_pair})


@pytest.mark.slow
@given(small_pairs())
@settings(max_examples=100, deadline=None)
def test_every_estimate_is_finite_and_inside_its_bounds(pair: TokenPair):
    for name, estimate in pair_metrics(pair)[0].items():
        assert math.isfinite(estimate.value), name
        if estimate.low is not None:
            assert estimate.high is not None
            slack = 1e-9 * max(1.0, abs(estimate.value))
            assert estimate.low - slack <= estimate.value <= estimate.high + slack, name
        assert estimate.num_tokens == pair.sequences.num_tokens


@pytest.mark.slow
@given(small_pairs())
@settings(max_examples=50, deadline=None)
def test_divergences_and_shares_stay_in_their_ranges(pair: TokenPair):
    values = values_of(pair)
    assert min(values[name] for name in ("kl_k2", "kl_k3", "kl_k3_seq", "abs_logprob_diff")) >= 0
    assert 0 < values["ess_token"] <= 1 + 1e-12
    assert 1 / pair.sequences.num_sequences - 1e-9 <= values["ess_seq"] <= 1 + 1e-12
    quantiles = [values[f"abs_logprob_diff_{q}"] for q in ("p50", "p90", "p99", "p99_9", "max")]
    assert quantiles == sorted(quantiles)


def test_exchanging_the_sides_turns_the_signed_metrics_over():
    pair = clustered_pair(16, seed=3)
    forth, back = values_of(pair), values_of(TokenPair(pair.sequences, pair.log_mu, pair.log_pi))
    assert back["kl_k1"] == pytest.approx(-forth["kl_k1"])
    assert back["prob_diff_extremes_max"] == pytest.approx(-forth["prob_diff_extremes_min"])
    assert back["abs_logprob_diff"] == pytest.approx(forth["abs_logprob_diff"])
    assert back["kl_k3"] != pytest.approx(forth["kl_k3"], rel=1e-6)


@pytest.mark.parametrize("shift", [-60.0, 0.0, 60.0, 800.0])
def test_the_effective_share_does_not_change_with_a_factor_common_to_all_weights(shift: float):
    diff = np.random.default_rng(0).normal(0, 1, 400)
    mu = np.full(400, -900.0)
    values = values_of(TokenPair(Sequences.of_lengths(np.ones(400, dtype=int)), mu + diff + shift, mu))
    weights = np.exp(diff)
    share = weights.sum() ** 2 / (400 * (weights**2).sum())
    assert (values["ess_seq"], values["ess_token"]) == pytest.approx((share, share))
