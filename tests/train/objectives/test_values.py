from dataclasses import replace

import pytest
import torch

from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import value_loss
from tests.train.objectives.batches import LENGTHS, gradient, planned, random_batch, tokens_at

PPO = build_objective("ppo", {"discount": 0.9, "value_clip": 0.2})


def new_values(batch: RolloutBatch, seed: int = 3) -> torch.Tensor:
    assert batch.values_T is not None
    noise = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (batch.values_T + 0.3 * noise).requires_grad_()


def test_a_value_loss_is_its_formula_written_out_with_loops():
    batch = random_batch(excluded=[2])
    plan, values = planned(PPO, batch), new_values(batch)
    assert plan.returns_T is not None
    assert batch.values_T is not None
    total, count = 0.0, 0
    for token, response in enumerate(batch.responses.of_token_T.tolist()):
        if response == 2:
            continue
        new, old, target = (tensor[token].item() for tensor in (values, batch.values_T, plan.returns_T))
        near = min(max(new, old - 0.2), old + 0.2)
        total += max((new - target) ** 2, (near - target) ** 2) / 2
        count += 1
    assert value_loss(plan.update(), values, range(8)).item() == pytest.approx(total / count)


def test_the_gradient_of_the_value_loss_is_its_finite_difference():
    batch = random_batch()
    update = planned(PPO, batch).update()
    assert torch.autograd.gradcheck(lambda given: value_loss(update, given, range(8)), new_values(batch))


def test_value_losses_of_micro_batches_add_up():
    batch = random_batch(excluded=[6])
    update, values = planned(PPO, batch).update(), new_values(batch)
    loss_of_all = value_loss(update, values, range(8))
    micro_batches = ([3, 1], [0, 7, 6], [5], [2, 4])
    parts = sum((value_loss(update, values[tokens_at(rows)], rows) for rows in micro_batches), torch.zeros(()))
    torch.testing.assert_close(parts, loss_of_all)
    torch.testing.assert_close(gradient(parts, values), gradient(loss_of_all, values))


def test_a_value_that_moved_too_far_towards_its_return_stops_learning():
    batch = random_batch()
    assert batch.values_T is not None
    plan = planned(PPO, replace(batch, values_T=torch.zeros_like(batch.values_T)))
    values = torch.full_like(batch.values_T, 0.3).requires_grad_()
    slope = gradient(value_loss(plan.update(), values, range(8)), values)
    assert plan.returns_T is not None
    towards = plan.returns_T > 0.3
    assert slope[towards].count_nonzero() == 0
    assert (slope[~towards] > 0).all()


def test_rejection_by_the_correction_takes_nothing_from_the_critic():
    batch = random_batch(mismatch=2.0)
    rejecting = replace(PPO, correction=build_objective("pg-seq-mis").correction)
    values = new_values(batch)
    assert planned(rejecting, batch).corrected.num_rejected > 0
    torch.testing.assert_close(
        value_loss(planned(rejecting, batch).update(), values, range(8)),
        value_loss(planned(PPO, batch).update(), values, range(8)),
    )


def test_another_number_of_values_than_tokens_is_refused():
    batch = random_batch()
    with pytest.raises(ValueError, match="with 7 tokens"):
        value_loss(planned(PPO, batch).update(), new_values(batch)[:3], [1])
