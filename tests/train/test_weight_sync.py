"""Does a sync tell whether the engine holds what it was sent? Each fault planted, and a sound engine beside it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.weight_sync import WeightSync, logit_error
from tests.train.model_engine import ModelEngine

pytestmark = pytest.mark.usefixtures("process_group")


def make_sync(llama: Path, rollouts: list[Rollout], *faults: str) -> tuple[Policy, ModelEngine, WeightSync]:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    engine = ModelEngine(llama, *faults)
    return policy, engine, WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])


def move(policy: Policy, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.add_(torch.randn(local.shape, generator=generator) * size)


def test_a_sound_sync_brings_both_sides_together_after_every_move(llama: Path, rollouts: list[Rollout]) -> None:
    policy, _, sync = make_sync(llama, rollouts)
    sync()
    for _ in range(3):
        move(policy, 0.01)
        found = sync()
        assert found["sync/engine_unchanged"] == 0
        assert found["sync/probe_k3"] < 1e-10
        assert found["update/policy_shift_k3"] > 1e-6


def test_an_engine_that_keeps_its_old_weights_is_told_at_the_next_sync(llama: Path, rollouts: list[Rollout]) -> None:
    policy, _, sync = make_sync(llama, rollouts, "ignores_weights")
    assert sync()["sync/engine_unchanged"] == 0
    move(policy, 1e-4)
    assert sync()["sync/engine_unchanged"] == 1


def test_sending_the_same_weights_again_does_not_clear_a_stale_engine(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts, "ignores_weights")
    sync()
    move(policy, 1e-4)
    sync()
    assert sync()["sync/engine_unchanged"] == 1
    engine.faults.clear()
    assert sync()["sync/engine_unchanged"] == 0


def test_weights_that_did_not_change_are_no_sign_of_a_stale_engine(llama: Path, rollouts: list[Rollout]) -> None:
    _, _, sync = make_sync(llama, rollouts)
    sync()
    found = sync()
    assert found["sync/engine_unchanged"] == 0
    assert found["update/policy_shift_k3"] == 0


def test_a_layer_perturbed_in_the_engine_shows_in_the_probe(llama: Path, rollouts: list[Rollout]) -> None:
    _, engine, sync = make_sync(llama, rollouts)
    sync()
    engine.perturbation = 0.05
    found = sync()
    assert found["sync/probe_k3_canary_ratio"] > 100


def test_the_error_of_a_logit_is_found_whatever_the_probability_of_its_token() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((2000, 8)) + 8 * np.eye(8)[0] * random.random((2000, 1))
    wrong = logits + 1e-3 * random.standard_normal((2000, 8))
    log_pi, log_mu = (one[:, 0] - np.log(np.exp(one).sum(axis=1)) for one in (logits, wrong))
    median_of_normal = 0.6745
    against_the_others = median_of_normal * 1e-3 * np.sqrt(1 + 1 / 3)
    assert logit_error(log_pi, log_mu) == pytest.approx(against_the_others, rel=0.2)
    sure = log_pi > np.log(0.95)
    assert logit_error(log_pi[sure], log_mu[sure]) == pytest.approx(against_the_others, rel=0.2)


def test_tokens_that_a_router_sends_elsewhere_are_not_taken_for_wrong_weights() -> None:
    log_mu = np.log(np.random.default_rng(0).uniform(0.01, 0.9, 200))
    rounding = 1e-3 * np.random.default_rng(1).standard_normal(200)
    flipped = rounding.copy()
    flipped[::20] += 1.0
    clean, routed = logit_error(log_mu + rounding, log_mu), logit_error(log_mu + flipped, log_mu)
    assert routed < 1.3 * clean
    assert logit_error(log_mu + 20 * rounding, log_mu) > 10 * clean


def test_a_restored_sync_compares_with_what_the_first_one_saw(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    saved = json.loads(json.dumps(sync.state()))
    move(policy, 0.01)
    expected = sync()
    again = WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])
    again.restore(saved)
    assert again() == expected
