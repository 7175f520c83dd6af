from dataclasses import replace

import pytest
import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.train.objectives.advantages import generalized_advantages, group_rewards, sequence_advantages
from mismatch_probe.train.objectives.catalogue import GROUP_RULES, CriticRule
from tests.train.objectives.batches import GROUPS, REWARDS, random_batch, tokens_at
from tests.train.objectives.literal import by_response, literal_advantages, literal_gae


def advantages(rule, rewards=REWARDS, groups=GROUPS) -> list[float]:
    given = torch.tensor(rewards, dtype=torch.float64)
    return sequence_advantages(rule, given, group_rewards(given, torch.tensor(groups))).tolist()


@pytest.mark.parametrize("rule", ["reward", "batch-mean", *sorted(GROUP_RULES)])
def test_an_advantage_is_its_formula_written_out_with_loops(rule):
    assert advantages(rule) == pytest.approx(literal_advantages(rule, list(REWARDS), list(GROUPS)))


@pytest.mark.parametrize("rule", sorted(GROUP_RULES))
def test_a_prompt_whose_samples_all_score_alike_teaches_nothing_at_all(rule):
    assert advantages(rule, [0.1, 0.1, 0.1, 1.0, 0.0], [1, 1, 1, 2, 2])[:3] == [0, 0, 0]


def test_flat_groups_are_counted_and_a_missing_reward_makes_none():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, torch.nan, torch.nan])
    groups = group_rewards(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    assert groups.flat_G.tolist() == [True, True, False, False]


@pytest.mark.parametrize("rule", ["batch-mean", *sorted(GROUP_RULES)])
def test_advantages_do_not_see_a_constant_added_to_every_reward(rule):
    assert advantages(rule, [reward + 5 for reward in REWARDS]) == pytest.approx(advantages(rule))


def test_only_the_standard_deviation_takes_the_scale_of_the_rewards_away():
    tenfold = [10 * reward for reward in REWARDS]
    assert advantages("group-mean-std", tenfold) == pytest.approx(advantages("group-mean-std"), rel=1e-4)
    assert advantages("group-mean", tenfold) == pytest.approx([10 * one for one in advantages("group-mean")])


@pytest.mark.parametrize("rule", sorted(GROUP_RULES))
def test_a_missing_reward_spoils_its_own_group_and_no_other(rule):
    found = advantages(rule, [1.0, 0.0, float("nan"), 0.0, 1.0], [0, 0, 5, 0, 5])
    assert [value != value for value in found] == [False, False, True, False, True]


@pytest.mark.parametrize("rule", sorted(GROUP_RULES))
def test_a_prompt_with_one_sample_has_nothing_to_be_compared_with(rule):
    with pytest.raises(UsageError, match="--samples-per-prompt 2"):
        advantages(rule, [1.0, 0.0, 1.0], [0, 0, 1])


@pytest.mark.parametrize("critic", [CriticRule(), CriticRule(discount=0.9, gae_lambda=0.8), CriticRule(gae_lambda=0.0)])
def test_gae_is_its_double_sum_whitened_over_what_is_in_the_loss(critic):
    batch = random_batch(excluded=[5])
    assert batch.values_T is not None
    whitened, returns = generalized_advantages(batch, critic)
    rows = by_response(batch, batch.values_T.tolist())
    literal = [
        literal_gae(reward, values, critic.discount, critic.gae_lambda)
        for reward, values in zip(REWARDS, rows, strict=True)
    ]
    flat = torch.tensor([value for row in literal for value in row], dtype=torch.float64)
    torch.testing.assert_close(returns, flat + batch.values_T)
    inside = whitened[tokens_at([row for row in range(8) if row != 5])]
    assert inside.mean().item() == pytest.approx(0, abs=1e-12)
    assert inside.std(correction=1).item() == pytest.approx(1, rel=1e-6)
    assert torch.corrcoef(torch.stack([flat, whitened]))[0, 1].item() == pytest.approx(1)


def test_without_discount_every_return_is_the_reward():
    batch = random_batch()
    _, returns = generalized_advantages(batch, CriticRule())
    torch.testing.assert_close(returns, batch.responses.spread(batch.rewards_N))


def test_a_critic_that_is_right_leaves_no_advantage():
    batch = random_batch()
    perfect = batch.responses.spread(batch.rewards_N)
    found, _ = generalized_advantages(replace(batch, values_T=perfect), CriticRule(gae_lambda=0.9))
    assert found.abs().max() < 1e-6
