import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.config.model import CorrectionName
from mismatch_probe.stats.corrections import (
    SEQUENCE_RULES,
    TOKEN_RULES,
    SequenceEvidence,
    TokenEvidence,
    simulate_corrections,
)
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import CORRECTIONS, Correction
from mismatch_probe.train.objectives.losses import correct
from tests.train.objectives.batches import GROUPS, LENGTHS, REWARDS, random_batch, tokens_at

RULES = {
    "token_truncate_3": CORRECTIONS["token-tis"],
    "token_mask_0.5_5": CORRECTIONS["icepop"],
    "sequence_weight": CORRECTIONS["seq-is"],
    "sequence_truncate_3": CORRECTIONS["seq-tis"],
    "sequence_mask_3": CORRECTIONS["seq-mis"],
}


def test_every_correction_that_a_setting_or_a_guard_can_name_is_there():
    assert tuple(CORRECTIONS) == get_args(CorrectionName)


def pair_of(batch: RolloutBatch) -> TokenPair:
    log_pi, log_mu = batch.old_logprobs_T.numpy() - 20, batch.mu_logprobs_T.numpy() - 20
    return TokenPair(Sequences.of_lengths(LENGTHS), log_pi, log_mu)


@pytest.mark.parametrize("mismatch", [0.001, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("name", RULES)
def test_a_correction_does_what_the_simulator_says_it_would(name, mismatch):
    batch = random_batch(mismatch=mismatch)
    found = correct(RULES[name], batch)
    [expected] = [result for result in simulate_corrections(pair_of(batch)) if result.name == name]
    assert found.share_clipped == pytest.approx(expected.share_clipped.value)
    ess = expected.ess_token if expected.level == "token" else expected.ess_seq
    assert (found.ess is None) == (ess is None)
    if ess is not None:
        assert found.ess == pytest.approx(ess.value)
    rejected = expected.share_rejected_token if expected.level == "token" else expected.share_rejected_seq
    assert rejected is not None
    assert found.share_rejected == pytest.approx(rejected.value)
    assert 1 - found.kept_T.double().mean().item() == pytest.approx(expected.share_rejected_token.value)


@pytest.mark.parametrize(
    "rule", [rule for rule in (*TOKEN_RULES, *SEQUENCE_RULES) if rule.name in RULES], ids=lambda rule: rule.name
)
def test_every_weight_is_that_of_the_statistics(rule):
    diff = np.array([-30.0, -21.0, -1.0, -1e-9, 0.0, 1e-9, 0.7, 1.0, 1.2, 1.7, 19.0, 25.0])
    batch = singles(diff)
    evidence = TokenEvidence(diff, diff) if rule in TOKEN_RULES else SequenceEvidence(diff, diff, diff, diff)
    expected = rule.decide(evidence)
    found = correct(RULES[rule.name], batch)
    assert found.kept_T.tolist() == expected.kept.tolist()
    assert found.num_clipped == expected.clipped.sum()
    np.testing.assert_allclose(found.weights_T, np.where(expected.kept, 1 + expected.excess, 0), rtol=1e-12, atol=1e-15)


def singles(diff: np.ndarray) -> RolloutBatch:
    """Responses of one token."""
    ones = torch.ones(len(diff), dtype=torch.long)
    mu = torch.full((len(diff),), -40.0, dtype=torch.float64)
    return RolloutBatch(ones.double(), ones, ones, ones.bool(), mu + torch.from_numpy(diff), mu)


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_equal_policies_need_no_correction(correction: Correction):
    found = correct(correction, random_batch(mismatch=0.0))
    assert found.weights_T.tolist() == [1.0] * sum(LENGTHS)
    assert found.num_clipped == found.num_rejected == 0
    assert found.ess == 1


def test_truncating_and_masking_part_where_the_threshold_is_passed():
    diff = np.log([2.9, 3.1, 0.01])
    assert correct(CORRECTIONS["seq-tis"], singles(diff)).weights_T.tolist() == pytest.approx([2.9, 3, 0.01])
    assert correct(CORRECTIONS["seq-mis"], singles(diff)).weights_T.tolist() == pytest.approx([2.9, 0, 0.01])
    assert correct(CORRECTIONS["seq-is"], singles(diff)).weights_T.tolist() == pytest.approx([2.9, 3.1, 0.01])
    assert correct(CORRECTIONS["icepop"], singles(diff)).kept_T.tolist() == [True, True, False]


def test_the_weight_of_a_response_is_the_product_over_its_tokens():
    batch = random_batch()
    diff = batch.old_logprobs_T - batch.mu_logprobs_T
    expected = math.exp(sum(diff[tokens_at([1])].tolist()))
    assert correct(CORRECTIONS["seq-is"], batch).weights_T[tokens_at([1])].tolist() == pytest.approx([expected] * 7)


def test_products_that_no_float_holds_stay_finite():
    batch = random_batch()
    far = replace(batch, mu_logprobs_T=batch.old_logprobs_T - 1000)
    assert correct(CORRECTIONS["seq-is"], far).weights_T.max().item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_excluded_responses_and_those_without_tokens_are_no_units(correction: Correction):
    batch = random_batch(excluded=[1])
    found = correct(correction, batch)
    assert found.num_units == (7 if correction.level == "sequence" else sum(LENGTHS) - 7)
    assert found.weights_T[tokens_at([1])].count_nonzero() == 0
    empty = replace(
        batch,
        rewards_N=torch.tensor([*REWARDS, 0.0]),
        group_ids_N=torch.tensor([*GROUPS, 9]),
        lengths_N=torch.tensor([*LENGTHS, 0]),
        included_N=torch.cat([batch.included_N, torch.tensor([True])]),
    )
    assert correct(correction, empty).num_units == found.num_units


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-25, 25), min_size=1, max_size=12), st.sampled_from(sorted(CORRECTIONS)))
def test_no_correction_invents_weight(diff, name):
    found = correct(CORRECTIONS[name], singles(np.array(diff)))
    raw = torch.tensor(diff, dtype=torch.float64).clamp(-20, 20).exp()
    assert ((found.weights_T <= raw * (1 + 1e-12)) | torch.tensor(name == "none")).all()
    assert found.kept_T.sum() == found.num_units - found.num_rejected
    assert found.ess is None or 1 / len(diff) <= found.ess * (1 + 1e-9) <= 1 + 1e-8


def test_where_all_is_rejected_there_is_no_effective_sample():
    assert correct(CORRECTIONS["seq-mis"], singles(np.array([9.0, 12.0]))).ess is None
