"""The critic: whose values belong to which token, what its loss pulls at, and what it can learn."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from mismatch_probe.config.train import LoraSettings, LossScaleSettings, OptimizerSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.learner import Learner, PolicyScores, rollout_batch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import LossPlan, plan_loss, value_loss
from mismatch_probe.train.optimizer import Critic, Optimizer, Updater
from mismatch_probe.train.parts import value_metrics
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.sharded import ValueModel
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

WHOLE, PIECES = 10_000, 40
UNCLIPPED = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9)


def optimizer(model: Policy | ValueModel) -> Optimizer:
    return Optimizer(model.trainable(), UNCLIPPED, steps=1000, scale=None)


def make_critic(folder: Path, micro_batch_tokens: int = WHOLE, *, with_head: bool = True) -> Critic:
    """A critic that values states differently, unless its head is to be the one it starts with."""
    model = ValueModel(folder, Dtype.FP32, PolicySettings(attention="eager"))
    if with_head:
        with torch.no_grad():
            local = model.module.head_D.to_local()  # type: ignore[attr-defined]
            local.copy_(0.1 * torch.randn(local.shape, generator=torch.Generator().manual_seed(0)))
    return Critic(model, optimizer(model), micro_batch_tokens)


def values_of(critic: Critic, sequence: TokenSequence) -> np.ndarray:
    with torch.no_grad(), critic.model.computing():
        return critic.model.values([sequence]).numpy()


def plan_of(rollouts: list[Rollout], scored: PolicyScores) -> LossPlan:
    batch = rollout_batch(rollouts, scored.log_pi_T, [True] * len(rollouts), scored.values_T)
    return plan_loss(build_objective("ppo"), batch, 16)


def gradient(model: Policy | ValueModel) -> torch.Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in model.trainable()])  # type: ignore[union-attr]


def weights(model: Policy | ValueModel) -> torch.Tensor:
    return torch.cat([p.full_tensor().flatten() for p in model.trainable()]).detach().clone()  # type: ignore[attr-defined]


def test_a_fresh_critic_expects_the_mean_reward_everywhere(llama: Path, rollouts: list[Rollout]) -> None:
    values_T, _ = make_critic(llama, with_head=False).score(rollouts, keep_graph=False)
    assert np.allclose(values_T, np.mean([rollout.reward for rollout in rollouts]))


def test_a_critic_that_has_learnt_keeps_what_it_expects(llama: Path, rollouts: list[Rollout]) -> None:
    critic = make_critic(llama)
    before = values_of(critic, rollouts[0].sequence)
    critic.score(rollouts, keep_graph=False)
    assert np.array_equal(values_of(critic, rollouts[0].sequence), before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
def test_a_value_is_the_head_on_the_hidden_state_that_chooses_the_token(
    family: str, rollouts: list[Rollout], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    critic = make_critic(folder)
    sequence = rollouts[0].sequence
    body = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden_SD = body(torch.tensor([sequence.prompt_token_ids + sequence.token_ids])).last_hidden_state[0]
    head = critic.model.module.head_D.full_tensor()  # type: ignore[attr-defined]
    first = len(sequence.prompt_token_ids) - 1
    expected = (hidden_SD[first:-1] @ head).detach().numpy()
    assert np.allclose(values_of(critic, sequence), expected, atol=1e-4)


def test_a_value_knows_neither_its_own_token_nor_any_later_one(llama: Path, rollouts: list[Rollout]) -> None:
    critic, before = make_critic(llama), rollouts[0].sequence
    changed = 1
    ids = [*before.token_ids[:changed], (before.token_ids[changed] + 1) % 250, *before.token_ids[changed + 1 :]]
    values = values_of(critic, before)
    others = values_of(critic, TokenSequence("changed", before.prompt_token_ids, ids))
    assert np.array_equal(values[: changed + 1], others[: changed + 1])
    assert (values[changed + 1 :] != others[changed + 1 :]).all()


@pytest.mark.slow
def test_values_come_in_the_order_of_the_responses_whatever_the_micro_batches(
    llama: Path, rollouts: list[Rollout]
) -> None:
    values_of_all, _ = make_critic(llama).score(rollouts, keep_graph=False)
    pieces, _ = make_critic(llama, PIECES).score(rollouts, keep_graph=False)
    alone = np.concatenate([values_of(make_critic(llama), rollout.sequence) for rollout in rollouts])
    assert np.allclose(values_of_all, pieces, atol=1e-5)
    assert np.allclose(values_of_all, alone, atol=1e-5)


@pytest.mark.slow
def test_the_gradient_is_the_finite_difference_of_the_value_loss(llama: Path, rollouts: list[Rollout]) -> None:
    critic = make_critic(llama)
    old_T, _ = critic.score(rollouts, keep_graph=False)
    log_pi_T = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    update = plan_of(rollouts, PolicyScores(log_pi_T, log_pi_T, None, old_T)).update()
    critic.accumulate(update, rollouts, range(len(rollouts)), None)
    head, bias = critic.model.module.head_D, critic.model.module.bias
    found = [head.grad.full_tensor()[3].item(), bias.grad.full_tensor()[0].item()]  # type: ignore[union-attr]

    def loss() -> float:
        values_T, _ = critic.score(rollouts, keep_graph=False)
        return float(value_loss(update, torch.from_numpy(values_T), range(len(rollouts))))

    numeric = []
    for parameter, place in ((head, (3,)), (bias, (0,))):
        sides = []
        for step in (1e-2, -2e-2):
            with torch.no_grad():
                parameter.to_local()[place] += step  # type: ignore[attr-defined]
            sides.append(loss())
        with torch.no_grad():
            parameter.to_local()[place] += 1e-2  # type: ignore[attr-defined]
        numeric.append((sides[0] - sides[1]) / 2e-2)
    assert found == pytest.approx(numeric, rel=1e-2, abs=1e-5)


@pytest.mark.slow
def test_micro_batches_and_kept_graphs_give_one_gradient(llama: Path, rollouts: list[Rollout]) -> None:
    gradients = []
    for tokens, keep_graph in ((WHOLE, True), (WHOLE, False), (PIECES, False)):
        critic = make_critic(llama, tokens)
        values_T, graph = critic.score(rollouts, keep_graph=keep_graph)
        assert (graph is not None) == keep_graph
        log_pi_T = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
        update = plan_of(rollouts, PolicyScores(log_pi_T, log_pi_T, None, values_T)).update()
        critic.accumulate(update, rollouts, range(len(rollouts)), graph)
        gradients.append(gradient(critic.model))
    assert gradients[0].abs().max() > 1e-3
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, atol=1e-5)


@pytest.mark.slow
def test_the_policy_learns_the_same_whether_or_not_a_critic_learns_beside_it(
    llama: Path, rollouts: list[Rollout]
) -> None:
    rows = range(len(rollouts))
    policy, critic = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0), make_critic(llama)
    updater = Updater(policy, optimizer(policy), critic, WHOLE)
    scored = updater.score(rollouts, keep_graph=True)
    update = plan_of(rollouts, scored).update()
    updater.accumulate(update, rollouts, rows, scored)
    alone = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    Learner(alone, WHOLE).accumulate(update, rollouts, rows, PolicyScores(scored.log_pi_T, scored.entropy_T, None), 1.0)
    assert gradient(alone).abs().max() > 1e-4
    assert torch.allclose(gradient(policy), gradient(alone), atol=1e-6)


def learnt(critic: Critic, rollouts: list[Rollout], updates: int) -> list[LossPlan]:
    """What each update found before it."""
    log_pi_T = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    plans = []
    for step in range(1, updates + 1):
        values_T, graph = critic.score(rollouts, keep_graph=True)
        plans.append(plan_of(rollouts, PolicyScores(log_pi_T, log_pi_T, None, values_T)))
        critic.accumulate(plans[-1].update(), rollouts, range(len(rollouts)), graph)
        critic.optimizer.unscale_and_clip()
        critic.optimizer.step(critic.optimizer.learning_rate(step))
    return plans


@pytest.mark.slow
def test_a_critic_comes_to_expect_a_constant_reward(llama: Path, rollouts: list[Rollout]) -> None:
    plans = learnt(make_critic(llama), [replace(rollout, reward=1.0) for rollout in rollouts], 30)
    errors = [float((plan.batch.values_T - 1).abs().max()) for plan in plans if plan.batch.values_T is not None]
    assert errors[0] > 1
    assert errors[-1] < 0.2


@pytest.mark.slow
def test_a_fresh_critic_comes_to_tell_apart_what_earns_differently(llama: Path, rollouts: list[Rollout]) -> None:
    plans = learnt(make_critic(llama, with_head=False), rollouts, 60)
    explained = [value_metrics(plan)["critic/explained_variance"] for plan in plans]
    assert explained[0] == 0
    assert explained[-1] > 0.8


def test_explained_variance_is_one_for_a_prophet_and_zero_for_a_constant(rollouts: list[Rollout]) -> None:
    log_pi_T = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    rewards_T = np.concatenate([np.full(rollout.length, rollout.reward) for rollout in rollouts])
    for values_T, expected in ((rewards_T, 1.0), (np.full(len(rewards_T), 0.3), 0.0)):
        found = value_metrics(plan_of(rollouts, PolicyScores(log_pi_T, log_pi_T, None, values_T)))
        assert found["critic/explained_variance"] == pytest.approx(expected)
        assert found["critic/value_mean"] == pytest.approx(values_T.mean())


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_forgotten_alone(llama: Path, rollouts: list[Rollout]) -> None:
    policy, critic = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0), make_critic(llama)
    updater = Updater(policy, optimizer(policy), critic, WHOLE)
    scored = updater.score(rollouts, keep_graph=False)
    updater.accumulate(plan_of(rollouts, scored).update(), rollouts, range(len(rollouts)), scored)
    critic.model.module.bias.grad.fill_(torch.inf)  # type: ignore[union-attr]
    assert critic.optimizer.unscale_and_clip() == torch.inf
    policy_before, critic_before = weights(policy), weights(critic.model)
    updater.step(1, 1.0)
    assert torch.equal(weights(critic.model), critic_before)
    assert not torch.equal(weights(policy), policy_before)
    assert all(parameter.grad is None for parameter in critic.model.trainable())


@pytest.mark.slow
def test_an_overflow_of_the_critic_lowers_its_own_loss_scale_alone(llama: Path, rollouts: list[Rollout]) -> None:
    policy, model = (
        Policy(llama, Dtype.FP16, PolicySettings(), temperature=1.0),
        ValueModel(llama, Dtype.FP16, PolicySettings()),
    )
    with torch.no_grad():
        model.module.head_D.to_local().fill_(0.1)  # type: ignore[attr-defined]
    own, critics = (
        Optimizer(one.trainable(), UNCLIPPED, steps=10, scale=LossScaleSettings(initial=scale))
        for one, scale in ((policy, 2.0**10), (model, 2.0**40))
    )
    updater = Updater(policy, own, Critic(model, critics, WHOLE), WHOLE)
    before = weights(model)
    scored = updater.score(rollouts, keep_graph=True)
    metrics = updater.accumulate(plan_of(rollouts, scored).update(), rollouts, range(len(rollouts)), scored)
    updater.step(1, 1.0)
    assert (metrics["optim/overflow"], metrics["optim/loss_scale"]) == (0, 2.0**10)
    assert (metrics["critic/overflow"], metrics["critic/loss_scale"]) == (1, 2.0**39)
    assert metrics["optim/nonfinite_gradients"] == 0
    assert math.isfinite(metrics["critic/value_loss"])
    assert torch.equal(weights(model), before)


def test_with_adapters_the_head_is_trained_beside_them(llama: Path) -> None:
    model = ValueModel(llama, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4)))
    trained = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert {"head_D", "bias"} < trained
    assert all(".lora_" in name for name in trained - {"head_D", "bias"})
