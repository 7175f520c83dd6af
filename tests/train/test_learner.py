"""Micro-batches add up to the batch, and nothing but the responses of an update reaches its gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.train.learner import Learner, PolicyScores, rollout_batch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import LossPlan, plan_loss
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]

WHOLE, PIECES = 10_000, 40


def plan(name: str, rollouts: list[Rollout], scored: PolicyScores) -> LossPlan:
    return plan_loss(build_objective(name), rollout_batch(rollouts, scored.log_pi_T, [True] * len(rollouts)), 16)


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in policy.trainable()])  # type: ignore[union-attr]


def learn(
    llama: Path, rollouts: list[Rollout], micro_batch_tokens: int, *, keep_graph: bool, scale: float = 1.0
) -> tuple[float, torch.Tensor]:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    learner = Learner(policy, micro_batch_tokens)
    scored = learner.score(rollouts, keep_graph=keep_graph)
    update = plan("grpo", rollouts, scored).update()
    accumulated = learner.accumulate(update, rollouts, range(len(rollouts)), scored, scale)
    return accumulated.loss, gradient(policy)


def test_micro_batches_add_up_to_the_whole_batch(llama: Path, rollouts: list[Rollout]) -> None:
    loss, logprobs_of_all = learn(llama, rollouts, WHOLE, keep_graph=False)
    loss_of_pieces, pieces = learn(llama, rollouts, PIECES, keep_graph=False)
    assert loss == pytest.approx(loss_of_pieces, abs=1e-6)
    assert logprobs_of_all.abs().max() > 1e-4
    assert torch.allclose(logprobs_of_all, pieces, atol=1e-6)


def test_the_kept_graph_gives_the_gradient_of_a_second_forward_pass(llama: Path, rollouts: list[Rollout]) -> None:
    _, twice = learn(llama, rollouts, WHOLE, keep_graph=False)
    _, once = learn(llama, rollouts, WHOLE, keep_graph=True)
    assert torch.allclose(once, twice, atol=1e-5)


def test_the_loss_scale_multiplies_the_gradient_and_not_the_loss(llama: Path, rollouts: list[Rollout]) -> None:
    loss, plain = learn(llama, rollouts, WHOLE, keep_graph=True)
    scaled_loss, scaled = learn(llama, rollouts, WHOLE, keep_graph=True, scale=64.0)
    assert scaled_loss == loss
    assert torch.allclose(scaled, 64 * plain, atol=1e-5)


def test_a_graph_is_kept_only_where_one_micro_batch_holds_everything(llama: Path, rollouts: list[Rollout]) -> None:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    assert Learner(policy, WHOLE).score(rollouts, keep_graph=True).graph is not None
    assert Learner(policy, PIECES).score(rollouts, keep_graph=True).graph is None


def test_scores_come_in_the_order_of_the_responses_whatever_the_micro_batches(
    llama: Path, rollouts: list[Rollout]
) -> None:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    logprobs_of_all = Learner(policy, WHOLE).score(rollouts, keep_graph=False)
    pieces = Learner(policy, PIECES).score(rollouts, keep_graph=False)
    assert np.allclose(logprobs_of_all.log_pi_T, pieces.log_pi_T, atol=1e-5)
    assert np.allclose(logprobs_of_all.entropy_T, pieces.entropy_T, atol=1e-5)


def test_responses_of_other_updates_do_not_reach_the_gradient(llama: Path, rollouts: list[Rollout]) -> None:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    learner = Learner(policy, WHOLE)
    scored = learner.score(rollouts, keep_graph=False)
    rows = [0, 1, 2, 3]
    learner.accumulate(plan("pg-seq-tis", rollouts, scored).update(rows), rollouts, rows, scored, 1.0)
    alone = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    first = [rollouts[row] for row in rows]
    scored_alone = Learner(alone, WHOLE).score(first, keep_graph=False)
    Learner(alone, WHOLE).accumulate(plan("pg-seq-tis", first, scored_alone).update(), first, rows, scored_alone, 1.0)
    assert torch.allclose(gradient(policy), gradient(alone), atol=1e-6)
