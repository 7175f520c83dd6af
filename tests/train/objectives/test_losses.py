from dataclasses import replace

import pytest
import torch

from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import OBJECTIVES, Objective, build_objective
from mismatch_probe.train.objectives.losses import plan_loss, policy_loss
from tests.train.objectives.batches import (
    MAX_NEW_TOKENS,
    gradient,
    moved,
    part_of,
    planned,
    random_batch,
    tokens_at,
    whole_loss,
)
from tests.train.objectives.literal import literal_loss

COMBINATIONS = [
    *OBJECTIVES.values(),
    build_objective("reinforce", {"advantage": "reward", "correction": "icepop", "normaliser": "token"}),
    build_objective("gspo", {"correction": "seq-tis", "advantage": "leave-one-out"}),
    build_objective("dr-grpo", {"correction": "icepop", "normaliser": "sequence"}),
    build_objective("grpo", {"clip_high": 0.28, "dual_clip": 1.3, "normaliser": "token"}),
    build_objective("ppo", {"correction": "seq-mis", "discount": 0.9, "gae_lambda": 0.8}),
]
NORMALISERS = ("token", "sequence", "constant-length")

every_objective = pytest.mark.parametrize("objective", COMBINATIONS, ids=lambda objective: objective.name)


@every_objective
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_its_formula_written_out_with_loops(objective: Objective, seed: int):
    batch = random_batch(seed, excluded=[seed])
    logprobs = moved(batch)
    expected = literal_loss(objective, batch, logprobs.tolist(), MAX_NEW_TOKENS)
    assert whole_loss(objective, batch, logprobs).loss.item() == pytest.approx(expected, rel=1e-9)


@every_objective
def test_a_gradient_is_the_finite_difference_of_the_loss(objective: Objective):
    batch = random_batch(excluded=[3])
    update = planned(objective, batch).update()
    assert torch.autograd.gradcheck(lambda given: policy_loss(update, given, range(8)).loss, moved(batch))


@every_objective
def test_micro_batches_add_up_to_the_loss_of_the_update(objective: Objective):
    batch = random_batch()
    update, logprobs = planned(objective, batch).update(), moved(batch)
    loss_of_all = policy_loss(update, logprobs, range(8))
    parts = [policy_loss(update, logprobs[tokens_at(rows)], rows) for rows in ([5, 0], [7], [2, 1, 6], [4, 3])]
    total = sum((part.loss for part in parts), torch.zeros(()))
    torch.testing.assert_close(total, loss_of_all.loss)
    torch.testing.assert_close(gradient(total, logprobs), gradient(loss_of_all.loss, logprobs))
    assert sum(int(part.num_clipped) for part in parts) == loss_of_all.num_clipped
    assert sum(int(part.num_tokens) for part in parts) == loss_of_all.num_tokens


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_each_update_of_a_round_has_denominators_of_its_own(normaliser):
    objective = build_objective("pg-seq-is", {"advantage": "reward", "normaliser": normaliser})
    batch = random_batch()
    logprobs = moved(batch)
    for rows in ([0, 1, 2], [3, 4, 5, 6, 7]):
        alone = part_of(batch, rows)
        expected = whole_loss(objective, alone, logprobs[tokens_at(rows)]).loss
        found = policy_loss(planned(objective, batch).update(rows), logprobs[tokens_at(rows)], rows).loss
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_what_is_rejected_leaves_the_denominator(normaliser):
    objective = build_objective("pg-seq-mis", {"advantage": "reward", "normaliser": normaliser})
    batch = random_batch(mismatch=0.01)
    batch.mu_logprobs_T[tokens_at([1])] -= 1
    kept = [row for row in range(8) if row != 1]
    logprobs = moved(batch)
    assert planned(objective, batch).corrected.num_rejected == 1
    torch.testing.assert_close(
        whole_loss(objective, batch, logprobs).loss,
        whole_loss(objective, part_of(batch, kept), logprobs[tokens_at(kept)]).loss,
    )
    truncating = replace(objective, correction=build_objective("pg-seq-tis").correction)
    assert whole_loss(truncating, batch, logprobs).loss != whole_loss(objective, batch, logprobs).loss


@every_objective
def test_what_an_excluded_response_holds_cannot_change_the_loss(objective: Objective):
    batch = random_batch(excluded=[1, 4])
    logprobs = moved(batch)
    clean = whole_loss(objective, batch, logprobs)
    out = tokens_at([1, 4])
    spoiled = replace(
        batch,
        old_logprobs_T=batch.old_logprobs_T.index_fill(0, out, torch.nan),
        mu_logprobs_T=batch.mu_logprobs_T.index_fill(0, out, torch.inf),
    )
    loss = whole_loss(objective, spoiled, logprobs.detach().index_fill(0, out, torch.nan).requires_grad_()).loss
    torch.testing.assert_close(loss, clean.loss)
    assert gradient(clean.loss, logprobs)[out].count_nonzero() == 0
    given = logprobs.detach().index_fill(0, out, torch.nan).requires_grad_()
    torch.testing.assert_close(
        gradient(whole_loss(objective, spoiled, given).loss, given), gradient(clean.loss, logprobs)
    )


@every_objective
def test_the_order_of_the_responses_does_not_matter(objective: Objective):
    batch = random_batch()
    logprobs = moved(batch)
    order = [6, 2, 0, 7, 5, 1, 3, 4]
    torch.testing.assert_close(
        whole_loss(objective, part_of(batch, order), logprobs[tokens_at(order)]).loss,
        whole_loss(objective, batch, logprobs).loss,
    )


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "grpo-token-tis", "ppo"])
def test_at_the_first_update_a_ratio_has_the_gradient_of_the_plain_policy_gradient(name):
    batch = random_batch()
    logprobs = moved(batch, by=0.0)
    objective = build_objective(name)
    plain = build_objective(name, {"ratio": "none"})
    with_ratio = gradient(whole_loss(objective, batch, logprobs).loss, logprobs)
    torch.testing.assert_close(with_ratio, gradient(whole_loss(plain, batch, logprobs).loss, logprobs))


def test_a_sequence_weight_makes_the_gradient_of_samples_from_mu_that_of_the_expected_reward():
    logits = torch.tensor([[0.3, -0.2], [0.9, 0.1], [-0.5, 0.4]], dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(dim=1)
    log_mu = torch.tensor([[0.0, 0.6], [0.2, -0.7], [1.1, 0.0]], dtype=torch.float64).log_softmax(dim=1)
    reward = {(0, 0): 1.0, (0, 1): -0.5, (1, 0): 0.25, (1, 1): 2.0}
    answers = list(reward)

    def log_of(table: torch.Tensor, answer: tuple[int, int]) -> torch.Tensor:
        return torch.stack([table[0, answer[0]], table[1 + answer[0], answer[1]]])

    def expected_gradient(name: str) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for answer in answers:
            one = RolloutBatch(
                rewards_N=torch.tensor([reward[answer]], dtype=torch.float64),
                group_ids_N=torch.tensor([0]),
                lengths_N=torch.tensor([2]),
                included_N=torch.tensor([True]),
                old_logprobs_T=log_of(log_pi, answer).detach(),
                mu_logprobs_T=log_of(log_mu, answer),
            )
            loss = whole_loss(build_objective(name, {"advantage": "reward"}), one, log_of(log_pi, answer)).loss
            total = total + log_of(log_mu, answer).sum().exp() * loss * MAX_NEW_TOKENS
        return -gradient(total, logits)

    value = sum((log_of(log_pi, answer).sum().exp() * reward[answer] for answer in answers), torch.zeros(()))
    torch.testing.assert_close(expected_gradient("pg-seq-is"), gradient(value, logits))
    assert (expected_gradient("reinforce") - gradient(value, logits)).abs().max() > 0.01


@every_objective
def test_a_reward_that_is_missing_reaches_the_loss(objective: Objective):
    batch = random_batch()
    spoiled = replace(batch, rewards_N=batch.rewards_N.index_fill(0, torch.tensor([2]), torch.nan))
    assert whole_loss(objective, spoiled, moved(batch)).loss.isnan()


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "reinforce"])
def test_a_reward_that_is_missing_reaches_nothing_once_its_prompt_is_left_out(name):
    objective, batch = build_objective(name), random_batch(excluded=[0, 1, 2])
    logprobs = moved(batch)
    spoiled = replace(batch, rewards_N=batch.rewards_N.index_fill(0, torch.tensor([2]), torch.nan))
    clean, loss = (whole_loss(objective, given, logprobs).loss for given in (batch, spoiled))
    torch.testing.assert_close(loss, clean)
    torch.testing.assert_close(gradient(loss, logprobs), gradient(clean, logprobs))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_response_whose_reward_is_missing_is_left_out_and_the_others_are_compared_without_it(name):
    """As if it had not been sampled."""
    objective, batch = build_objective(name), random_batch(excluded=[2])
    spoiled = replace(batch, rewards_N=batch.rewards_N.index_fill(0, torch.tensor([2]), torch.nan))
    kept = [row for row in range(len(batch.lengths_N)) if row != 2]
    tokens, without = tokens_at(kept), part_of(batch, kept)
    found, expected = planned(objective, spoiled).advantages_T, planned(objective, without).advantages_T
    torch.testing.assert_close(found[tokens], expected)
    assert whole_loss(objective, spoiled, moved(batch)).loss.isfinite()


@pytest.mark.parametrize("leg", ["old_logprobs_T", "mu_logprobs_T"])
@pytest.mark.parametrize("name", ["grpo-token-tis", "grpo-seq-mis", "pg-seq-is", "pg-seq-tis", "pg-seq-mis"])
def test_a_logprob_that_is_missing_is_neither_rejected_nor_truncated(name, leg):
    batch = random_batch()
    spoiled = replace(batch, **{leg: getattr(batch, leg).index_fill(0, torch.tensor([20]), torch.nan)})
    assert planned(build_objective(name), spoiled).corrected.num_rejected == 0
    assert whole_loss(build_objective(name), spoiled, moved(batch)).loss.isnan()


def test_where_everything_is_rejected_the_loss_and_its_gradient_are_zero():
    batch = random_batch()
    far = replace(batch, mu_logprobs_T=batch.old_logprobs_T - 10)
    for normaliser in NORMALISERS:
        logprobs = moved(far)
        result = whole_loss(build_objective("grpo-seq-mis", {"normaliser": normaliser}), far, logprobs)
        assert result.loss == 0
        assert result.num_tokens == 0
        assert gradient(result.loss, logprobs).count_nonzero() == 0


def test_a_response_of_another_update_makes_the_loss_nan():
    batch = random_batch()
    update = planned(build_objective("grpo"), batch).update([0, 1])
    rows = [1, 2]
    assert policy_loss(update, moved(batch)[tokens_at(rows)], rows).loss.isnan()


def test_tokens_whose_gradient_the_clip_cuts_off_are_counted():
    batch = random_batch()
    logprobs = moved(batch, by=0.5)
    result = whole_loss(build_objective("dr-grpo"), batch, logprobs)
    cut = gradient(result.loss, logprobs) == 0
    flat = planned(build_objective("dr-grpo"), batch).advantages_T == 0
    assert result.num_clipped == (cut & ~flat).sum() > 0


def test_another_number_of_logprobs_than_tokens_is_refused():
    batch = random_batch()
    update = planned(build_objective("grpo"), batch).update()
    with pytest.raises(ValueError, match="with 4 tokens"):
        policy_loss(update, moved(batch)[:3], [0, 2])


def test_an_objective_with_a_critic_needs_values():
    with pytest.raises(ValueError, match="values_T"):
        plan_loss(build_objective("ppo"), replace(random_batch(), values_T=None), MAX_NEW_TOKENS)


def test_tensors_of_other_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="mu_logprobs_T"):
        replace(random_batch(), mu_logprobs_T=torch.zeros(3))


def test_logprobs_of_sixteen_bit_are_computed_with_in_fp32():
    batch = random_batch()
    loss = whole_loss(build_objective("grpo"), batch, moved(batch).half()).loss
    assert loss.dtype == torch.float32


INFINITE = [*OBJECTIVES, "dual clip"]


@pytest.mark.parametrize("leg", ["logprobs", "old_logprobs_T", "mu_logprobs_T"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_logprob_that_the_loss_is_made_of_leaves_no_finite_loss(name: str, value: float, leg: str):
    objective = build_objective("grpo", {"dual_clip": 10.0}) if name == "dual clip" else build_objective(name)
    batch, logprobs = random_batch(), moved(random_batch())
    at = torch.tensor([20])
    if leg == "logprobs":
        logprobs = logprobs.detach().index_fill(0, at, value).requires_grad_()
    else:
        batch = replace(batch, **{leg: getattr(batch, leg).index_fill(0, at, value)})
    reads = {
        "logprobs": True,
        "old_logprobs_T": objective.ratio.level != "none" or objective.correction.action != "none",
        "mu_logprobs_T": objective.correction.action != "none",
    }
    assert bool(whole_loss(objective, batch, logprobs).loss.isfinite()) != reads[leg]


def test_rewards_that_are_all_infinite_are_not_a_flat_group():
    batch = random_batch()
    spoiled = replace(batch, rewards_N=batch.rewards_N.index_fill(0, torch.tensor([6, 7]), torch.inf))
    assert not whole_loss(build_objective("grpo"), spoiled, moved(batch)).loss.isfinite()


def test_a_dual_clip_bounds_the_ratio_where_the_advantage_is_negative_and_cuts_its_gradient():
    batch = random_batch()
    far = (batch.old_logprobs_T + 3.0).requires_grad_()
    plain, dual = (build_objective("grpo", given) for given in ({}, {"dual_clip": 10.0}))
    worse = planned(plain, batch).advantages_T < 0
    unbounded, bounded = (whole_loss(objective, batch, far) for objective in (plain, dual))
    assert gradient(unbounded.loss, far)[worse].all()
    assert not gradient(bounded.loss, far)[worse].any()
    assert bounded.loss < unbounded.loss
    assert bounded.num_clipped == unbounded.num_clipped + int(worse.sum())
