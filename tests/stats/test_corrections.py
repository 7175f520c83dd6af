import math

import numpy as np
import pytest
from hypothesis import given, settings

from mismatch_probe.stats.corrections import (
    SEQUENCE_RULES,
    SMALLEST_CAP,
    SMALLEST_PROB_DIFF,
    TOKEN_RULES,
    SequenceEvidence,
    TokenEvidence,
    simulate_corrections,
)
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import CorrectionResult, Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair
from tests.stats.pairs import gaussian_pair, pair_with
from tests.stats.test_metrics import small_pairs


def simulated(pair: TokenPair) -> dict[str, CorrectionResult]:
    return {result.name: result for result in simulate_corrections(pair)}


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


def test_every_rule_is_simulated_under_a_name_of_its_own():
    results = simulate_corrections(gaussian_pair(8, 20, 0.1))
    assert len({result.name for result in results}) == len(results) == len(TOKEN_RULES) + len(SEQUENCE_RULES)


def test_equal_policies_need_no_correction():
    for result in simulate_corrections(pair_with(np.zeros(2000), np.full(20, 100))):
        assert value(result.ess_token) == 1
        assert value(result.mean_weight) == 1
        assert result.bias.value == result.share_clipped.value == result.share_rejected_token.value == 0
        assert result.abs_weight_error.value == 0


def test_plain_weights_keep_the_effective_sample_that_the_metrics_report():
    pair = gaussian_pair(50, 30, 0.2)
    results, (metrics, _) = simulated(pair), pair_metrics(pair)
    assert value(results["token_weight"].ess_token) == pytest.approx(metrics["ess_token"].value)
    assert value(results["sequence_weight"].ess_seq) == pytest.approx(metrics["ess_seq"].value)
    assert results["token_weight"].bias.value == results["sequence_weight"].bias.value == 0


def test_a_known_pair_gives_known_corrections():
    rho = np.array([1.0, 4.0, 0.25, 1.0])
    pair = TokenPair(Sequences.of_lengths([2, 2]), np.log(0.1 * rho), np.full(4, np.log(0.1)))
    results = simulated(pair)
    truncated = results["token_truncate_2"]
    assert value(truncated.mean_weight) == pytest.approx((1 + 2 + 0.25 + 1) / 4)
    assert truncated.share_clipped.value == 0.25
    assert truncated.bias.value == pytest.approx(-2 / 4)
    masked = results["token_mask_0.5_5"]
    assert value(masked.mean_weight) == pytest.approx(6 / 3)
    assert value(masked.ess_token) == pytest.approx(6**2 / (3 * 18))
    assert masked.share_rejected_token.value == 0.25
    assert masked.bias.value == pytest.approx(-0.25 / 4)
    dropped = results["token_drop_raised_0.2"]
    assert value(dropped.mean_weight) == pytest.approx(2.25 / 3)
    sequences = results["sequence_mask_3"]
    assert sequences.share_rejected_seq is not None
    assert sequences.share_rejected_seq.value == 0.5
    assert value(sequences.mean_weight) == pytest.approx(0.25)
    assert value(results["sequence_truncate_3"].mean_weight) == pytest.approx((3 + 0.25) / 2)


def test_what_is_rejected_leaves_the_denominator():
    diff = np.tile([0.0, -8.0], 100)
    masked = simulated(pair_with(diff, np.full(20, 10)))["token_mask_0.5_5"]
    assert masked.share_rejected_token.value == 0.5
    assert value(masked.ess_token) == 1
    assert value(masked.mean_weight) == 1


def test_a_rule_that_rejects_everything_has_no_effective_sample():
    rejected = simulated(pair_with(np.full(1000, 0.5), np.full(10, 100)))["sequence_reject_geometric_0.999_1.001"]
    assert rejected.ess_seq is None
    assert rejected.mean_weight is None
    assert rejected.share_rejected_seq is not None
    assert rejected.share_rejected_seq.value == 1


def test_one_catastrophic_token_vetoes_its_sequence_alone():
    diff = np.zeros(2000)
    diff[1234] = math.log(0.5e-4)
    veto = simulated(pair_with(diff, np.full(20, 100)))["sequence_reject_veto_0.0001"]
    assert veto.share_rejected_seq is not None
    assert veto.share_rejected_seq.value == 0.05


@pytest.mark.slow
def test_gaussian_sequences_lose_their_effective_sample_with_length_as_the_closed_form_says():
    plain = simulated(gaussian_pair(4000, 256, 0.05))["sequence_weight"]
    assert [point.num_tokens for point in plain.by_length] == [16, 32, 64, 128, 256]
    for point in plain.by_length:
        assert point.ess == pytest.approx(math.exp(-point.num_tokens * 0.05**2), abs=0.05)


@pytest.mark.slow
def test_truncated_sequences_are_clipped_more_often_the_longer_they_are():
    truncated = simulated(gaussian_pair(2000, 512, 0.05))["sequence_truncate_2"]
    shares = [point.share_clipped for point in truncated.by_length]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0]


@pytest.mark.slow
def test_token_rules_by_length_end_where_the_whole_sample_does():
    pair = gaussian_pair(32, 256, 0.5)
    for rule in TOKEN_RULES:
        result = simulated(pair)[rule.name]
        assert result.by_length[-1].num_tokens == 256
        assert result.by_length[-1].ess == pytest.approx(value(result.ess_token))
        assert result.by_length[-1].share_rejected == pytest.approx(result.share_rejected_token.value)


def test_few_long_responses_make_no_point_of_the_length_curve():
    lengths = [64] * 20 + [512] * 3
    points = simulated(pair_with(np.zeros(sum(lengths)), lengths))["token_weight"].by_length
    assert [point.num_tokens for point in points] == [16, 32, 64]


def test_huge_ratios_stay_finite():
    log_mu = np.concatenate([np.full(10, -700.0), np.zeros(990)])
    pair = TokenPair(Sequences.of_lengths(np.full(10, 100)), np.zeros(1000), log_mu)
    for result in simulate_corrections(pair):
        assert math.isfinite(result.bias.value)
        assert result.ess_token is None or 0 <= result.ess_token.value <= 1


def test_no_token_rule_touches_what_is_summed_once_for_all():
    log_ratio = np.array([-SMALLEST_CAP, 0.0, SMALLEST_CAP])
    for prob_diff in (-SMALLEST_PROB_DIFF, SMALLEST_PROB_DIFF):
        for rule in TOKEN_RULES:
            decision = rule.decide(TokenEvidence(log_ratio, np.full(3, prob_diff)))
            assert decision.kept.all(), rule.name
            assert not decision.clipped.any(), rule.name
            assert decision.excess == pytest.approx(np.expm1(log_ratio)), rule.name


def test_masking_rejects_what_truncation_only_bounds():
    log_ratio = np.log(np.array([0.1, 1.0, 2.5]))
    evidence = SequenceEvidence(log_ratio, log_ratio / 10, np.zeros(3), log_ratio)
    rules = {rule.name: rule.decide(evidence) for rule in SEQUENCE_RULES}
    assert rules["sequence_truncate_2"].kept.tolist() == [True, True, True]
    assert rules["sequence_truncate_2"].excess[2] == 1
    assert rules["sequence_mask_2"].kept.tolist() == [True, True, False]
    assert not rules["sequence_mask_2"].clipped.any()


@pytest.mark.slow
@given(small_pairs())
@settings(max_examples=50, deadline=None)
def test_every_correction_stays_in_range_and_its_bias_below_its_bound(pair: TokenPair):
    for result in simulate_corrections(pair):
        for share in (result.share_clipped, result.share_rejected_token, result.share_rejected_seq):
            assert share is None or 0 <= share.value <= 1
        for ess in (result.ess_token, result.ess_seq):
            assert ess is None or 0 <= ess.value <= 1 + 1e-12
        assert abs(result.bias.value) <= result.abs_weight_error.value + 1e-9
        if "truncate" in result.name:
            assert result.bias.value <= 1e-12
