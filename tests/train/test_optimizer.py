"""Loss scaling, clipping and the schedule, each against its definition."""

import math

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from mismatch_probe.config.train import LossScaleSettings, OptimizerSettings
from mismatch_probe.train.optimizer import LossScale, Optimizer


def one_parameter(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value, value]))


def optimizer(parameter: torch.nn.Parameter, scale: LossScaleSettings | None = None, **changes: object) -> Optimizer:
    settings = OptimizerSettings.model_validate({"learning_rate": 0.1, **changes})
    return Optimizer([parameter], settings, steps=10, scale=scale)


def test_the_scale_halves_on_an_overflow_and_doubles_after_the_interval() -> None:
    scale = LossScale(8.0, growth_interval=2)
    scale.update(overflow=True)
    assert scale.value == 4.0
    scale.update(overflow=False)
    assert scale.value == 4.0
    scale.update(overflow=False)
    assert scale.value == 8.0


@pytest.mark.parametrize(("initial", "largest"), [(2.0**12, 2.0**24), (2.0**30, 2.0**30)])
def test_gradients_of_zero_do_not_raise_the_scale_for_ever(initial: float, largest: float) -> None:
    """2^60 would take 40 updates that overflow until the first gradient is applied again."""
    scale = LossScale(initial, growth_interval=1)
    for _ in range(200):
        scale.update(overflow=False)
    assert scale.value == largest


def test_an_overflow_starts_the_count_of_clean_steps_again() -> None:
    scale = LossScale(8.0, growth_interval=2)
    for overflow in (False, True, False):
        scale.update(overflow=overflow)
    assert scale.value == 4.0


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    parameter = one_parameter()
    found = optimizer(parameter, LossScaleSettings(initial=1024.0), max_grad_norm=1.0)
    parameter.grad = torch.tensor([3.0, 4.0]) * 1024
    assert found.unscale_and_clip() == pytest.approx(5.0)
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-5)


def test_gradients_below_the_limit_are_left_as_they_are() -> None:
    parameter = one_parameter()
    found = optimizer(parameter, max_grad_norm=10.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    found.unscale_and_clip()
    assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_told_by_its_norm_and_moves_the_scale(bad: float) -> None:
    parameter = one_parameter()
    found = optimizer(parameter, LossScaleSettings(initial=1024.0))
    parameter.grad = torch.tensor([1.0, bad])
    assert not math.isfinite(found.unscale_and_clip())
    assert found.scale == 512.0
    assert found.overflows_in_a_row == 1
    assert not found.has_nonfinite_gradient, "the scale explains it"
    parameter.grad = torch.tensor([1.0, 1.0])
    found.unscale_and_clip()
    assert found.overflows_in_a_row == 0


@pytest.mark.parametrize(("bad", "is_fault"), [(math.inf, True), (math.nan, True), (1.0, False)])
def test_without_a_loss_scale_a_gradient_that_is_not_finite_is_a_fault(bad: float, is_fault: bool) -> None:
    parameter = one_parameter()
    found = optimizer(parameter)
    parameter.grad = torch.tensor([1.0, bad])
    found.unscale_and_clip()
    assert found.has_nonfinite_gradient == is_fault


def test_a_step_is_adamws() -> None:
    ours, theirs = one_parameter(), one_parameter()
    found = optimizer(ours, weight_decay=0.1, max_grad_norm=100.0)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        ours.grad = torch.tensor([0.5, -2.0])
        theirs.grad = torch.tensor([0.5, -2.0])
        found.unscale_and_clip()
        found.step(0.1)
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_discarded_gradients_leave_the_weights_alone() -> None:
    parameter = one_parameter()
    found = optimizer(parameter)
    parameter.grad = torch.tensor([1.0, 1.0])
    found.discard()
    assert parameter.grad is None
    assert torch.equal(parameter.detach(), torch.tensor([1.0, 1.0]))


@pytest.mark.parametrize(
    ("schedule", "warmup", "step", "share"),
    [
        ("constant", 0, 1, 1.0),
        ("constant", 4, 1, 0.2),
        ("constant", 4, 5, 1.0),
        ("linear", 0, 6, 0.5),
        ("cosine", 0, 6, 0.5),
        ("cosine", 0, 11, 0.0),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, warmup: int, step: int, share: float) -> None:
    found = optimizer(one_parameter(), schedule=schedule, warmup_steps=warmup)
    assert found.learning_rate(step) == pytest.approx(0.1 * share)


def test_a_restored_optimizer_has_the_scale_it_was_saved_with() -> None:
    first = optimizer(one_parameter(), LossScaleSettings(initial=64.0))
    assert first.loss_scale is not None
    first.loss_scale.update(overflow=True)
    second = optimizer(one_parameter(), LossScaleSettings(initial=64.0))
    second.restore(first.small_state())
    assert second.loss_scale == first.loss_scale


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_before_the_first_step_takes_no_step_of_adamw() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    plain = torch.nn.Parameter(module.weight.detach().clone())
    found = Optimizer([module.weight], OptimizerSettings(learning_rate=0.1), steps=10, scale=None)
    reference = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0)
    get_state_dict(module, found.adamw)
    for _ in range(3):
        module.weight.grad, plain.grad = torch.tensor([[0.3, -0.1]]), torch.tensor([[0.3, -0.1]])
        found.step(0.1)
        reference.step()
    assert torch.allclose(module.weight, plain, rtol=1e-6)


@pytest.mark.parametrize(("gradient", "has"), [(0.0, False), (1e-18, True), (math.inf, False), (math.nan, False)])
def test_there_is_a_gradient_where_it_is_finite_and_not_all_zero(gradient: float, has: bool) -> None:
    parameter = one_parameter()
    made = optimizer(parameter)
    assert not made.has_gradient
    parameter.grad = torch.tensor([0.0, gradient], dtype=torch.float32)
    made.unscale_and_clip()
    assert made.has_gradient is has
