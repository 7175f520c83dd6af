"""Totals that ranks add up give the metrics of all their responses."""

import numpy as np
import pytest

from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.pair_totals import PairTotals
from mismatch_probe.stats.sequences import Sequences, TokenPair


def pair(scale: float, drift: float = 0.0, seed: int = 0, sequences: int = 24) -> TokenPair:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, sequences)
    log_mu = -rng.exponential(1.0, lengths.sum())
    log_pi = np.minimum(log_mu + scale * rng.standard_normal(log_mu.size) + drift, 0.0)
    return TokenPair(Sequences.of_lengths(lengths), log_pi, log_mu, entropy_pi=rng.exponential(1.0, log_mu.size))


def metric_values(complete_pair: TokenPair) -> dict[str, float]:
    return {name: estimate.value for name, estimate in pair_metrics(complete_pair)[0].items()}


def parts(complete_pair: TokenPair, cuts: list[int]) -> list[TokenPair]:
    starts, ends = [0, *cuts], [*cuts, complete_pair.sequences.num_sequences]
    number = complete_pair.sequences.spread(np.arange(complete_pair.sequences.num_sequences))
    pieces = [
        complete_pair.of_tokens((number >= start) & (number < end)) for start, end in zip(starts, ends, strict=True)
    ]
    return [piece for piece in pieces if piece is not None]


@pytest.mark.parametrize(
    ("scale", "drift"),
    [(1e-7, 0.0), (1e-2, 0.0), (0.5, 0.0), (3.0, 0.0), (1.0, -4.0), (0.0, -60.0)],
    ids=["FP32", "BF16", "bug", "other weights", "far behind", "beyond every bound"],
)
@pytest.mark.parametrize("cuts", [[], [12], [1, 2, 23]], ids=["one rank", "two ranks", "four ranks"])
def test_the_values_are_those_of_the_estimator(scale, drift, cuts):
    complete_pair = pair(scale, drift)
    totals = PairTotals.of_arrays(PairTotals.of(piece).to_array() for piece in parts(complete_pair, cuts))
    expected = metric_values(complete_pair)
    values = totals.values()
    beyond_digits = {"prob_pearson"} if drift < -20 else set()
    for name in values.keys() - {"is_ratio_mean_token_error", "kl_k3_error"} - beyond_digits:
        assert values[name] == pytest.approx(expected.get(name, np.nan), rel=1e-8, abs=1e-12, nan_ok=True), name


def test_the_error_of_k3_takes_the_responses_to_one_prompt_together():
    alone = pair(0.1)
    k3, error = (PairTotals.of(alone).values()[name] for name in ("kl_k3", "kl_k3_error"))
    lengths = np.tile(alone.sequences.lengths, 4)
    prompts = np.tile(np.arange(24), 4)
    copied = TokenPair(Sequences.of_lengths(lengths, prompts), np.tile(alone.log_pi, 4), np.tile(alone.log_mu, 4))
    assert PairTotals.of(copied).values()["kl_k3_error"] == pytest.approx(error)
    assert k3 / 24**0.5 <= error < k3
    one = TokenPair(Sequences.of_lengths(alone.sequences.lengths, np.zeros(24)), alone.log_pi, alone.log_mu)
    assert PairTotals.of(one).values()["kl_k3_error"] == pytest.approx(k3)


def test_the_digits_of_an_effective_share_near_1_are_kept():
    complete_pair = pair(1e-5)
    totals = PairTotals.of_arrays(PairTotals.of(piece).to_array() for piece in parts(complete_pair, [7]))
    assert 1 - totals.values()["ess_token"] == pytest.approx(1 - metric_values(complete_pair)["ess_token"], rel=1e-5)


def test_parts_that_lie_far_apart_have_the_share_of_the_whole():
    low, high = pair(0.1, -30.0, seed=1), pair(0.1, 0.0, seed=2)
    lengths = np.concatenate([low.sequences.lengths, high.sequences.lengths])
    complete_pair = TokenPair(
        Sequences.of_lengths(lengths),
        np.concatenate([low.log_pi, high.log_pi]),
        np.concatenate([low.log_mu, high.log_mu]),
    )
    together = (PairTotals.of(low) + PairTotals.of(high)).values()
    for name in ("ess_token", "ess_seq"):
        assert together[name] == pytest.approx(metric_values(complete_pair)[name], rel=1e-9)


def test_a_rank_without_a_response_adds_nothing():
    complete_pair = PairTotals.of(pair(0.1))
    assert (PairTotals() + complete_pair).to_array() == pytest.approx(complete_pair.to_array())
    assert np.isnan(PairTotals().values()["kl_k3"])


@pytest.mark.parametrize("change", [1, -1])
def test_an_array_of_another_length_is_refused(change):
    array = PairTotals().to_array()
    other = np.zeros(array.size + change)
    with pytest.raises(ValueError, match="numbers given"):
        PairTotals.of_array(other)
