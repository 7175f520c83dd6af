"""TRL's GRPOTrainer without vLLM, on the demo checkpoint: rewards, lengths, losses and updates are real."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("trl", reason="TRL is not installed")

from mismatch_probe.adapters.trl import CAN, guard, probed_ids  # noqa: E402
from mismatch_probe.errors import UsageError  # noqa: E402
from mismatch_probe.guards.diagnosis import EndCause  # noqa: E402
from mismatch_probe.guards.guards import Guards  # noqa: E402
from mismatch_probe.guards.rules import parse_guards  # noqa: E402
from tests.other_trainers.small_grpo import STEPS, grpo_trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def made(reward: Callable[..., list[float]], **given: Any) -> Any:
        return grpo_trainer(tmp_path, reward, **given)

    yield made
    logging.getLogger("mismatch_probe").handlers.clear()


def weights(trainer: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def distinct(completions: list[Any], **_: Any) -> list[float]:
    return [float(number) for number in range(len(completions))]


def test_without_vllm_the_sampler_s_guards_are_off_and_the_others_log(trainer: Callable[..., Any]) -> None:
    made = trainer(distinct)
    guards = guard(made)
    made.train()
    logs = [log for log in made.state.log_history if "reward" in log]
    assert len(logs) == STEPS
    assert all(log["reward/mean"] == pytest.approx(log["reward"]) for log in logs)
    assert all(log["optim/grad_norm"] == pytest.approx(log["grad_norm"]) for log in logs)
    assert "mismatch-limit" in guards.off
    assert "reward-nonfinite" not in guards.off


def test_rewards_that_are_no_numbers_move_nothing_and_end_the_run(trainer: Callable[..., Any]) -> None:
    made = trainer(lambda completions, **_: [float("nan")] * len(completions))
    guards = guard(made)
    before = weights(made)
    made.train()
    assert made.state.global_step == 4
    assert guards.diagnosis().cause is EndCause.REWARD_NAN
    assert all(torch.equal(*pair) for pair in zip(before, weights(made), strict=True))


def test_several_updates_of_a_batch_are_all_withheld(trainer: Callable[..., Any]) -> None:
    made = trainer(lambda completions, **_: [float("nan")] * len(completions), num_iterations=2, max_steps=12)
    guard(made)
    before = weights(made)
    made.train()
    assert made.state.global_step == 7
    assert all(torch.equal(*pair) for pair in zip(before, weights(made), strict=True))


def spoil_gradient(trainer: Any, value: float, update: int) -> None:
    """One number of one gradient of one update, counted from 1, is `value`."""
    step, updates = trainer.training_step, iter(range(1, 100))

    def spoiled(model: Any, *given: Any, **named: Any) -> Any:
        loss = step(model, *given, **named)
        if next(updates) == update:
            next(parameter for parameter in model.parameters() if parameter.grad is not None).grad.view(-1)[0] = value
        return loss

    trainer.training_step = spoiled


def watch(trainer: Any, guards: Guards) -> list[tuple[set[str], bool, list[Any]]]:
    """Of each optimizer step: the guards that fired, whether all weights are finite after it, and these weights."""
    from transformers import TrainerCallback

    steps, fired = list[tuple[set[str], bool, list[Any]]](), set[str]()

    def recording(decide: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **named: Any) -> Any:
            decision = decide(*given, **named)
            fired.update(event.guard for event in decision.events)
            return decision

        return recorded

    guards.observe = recording(guards.observe)  # type: ignore[method-assign]
    guards.observe_update = recording(guards.observe_update)  # type: ignore[method-assign]

    class After(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = weights(trainer)
            steps.append((set(fired), all(bool(weight.isfinite().all()) for weight in now), now))
            fired.clear()

    trainer.add_callback(After())
    return steps


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_gradient_that_is_not_finite_moves_nothing_and_the_run_goes_on(
    trainer: Callable[..., Any], value: float, updates: int
) -> None:
    made = trainer(distinct, num_iterations=updates)
    spoil_gradient(made, value, update=4)
    steps = watch(made, guard(made))
    made.train()
    assert [sorted(fired) for fired, _, _ in steps] == [[], [], [], ["gradient-nonfinite"], [], []]
    assert all(finite for _, finite, _ in steps)
    before, spoiled, after = (steps[number][2] for number in (2, 3, 4))
    assert all(map(torch.equal, before, spoiled))
    assert not all(map(torch.equal, spoiled, after))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_trl_averages_away_in_its_log_is_seen(trainer: Callable[..., Any], value: float) -> None:
    made = trainer(distinct)
    loss = made.compute_loss
    made.compute_loss = lambda *given, **named: loss(*given, **named) * (value if made.state.global_step == 3 else 1)
    steps = watch(made, guard(made))
    made.train()
    assert made.args.logging_nan_inf_filter
    assert all(abs(log["loss"]) < 1e6 for log in made.state.log_history if "loss" in log), "TRL's log shows nothing"
    assert [sorted(fired) for fired, _, _ in steps][3] == ["gradient-nonfinite", "loss-nonfinite"]
    assert not any(fired for number, (fired, _, _) in enumerate(steps) if number != 3)
    assert all(finite for _, finite, _ in steps)


def test_a_clean_run_warns_of_nothing_and_constant_rewards_do(trainer: Callable[..., Any]) -> None:
    clean = trainer(distinct, max_steps=34)
    steps = watch(clean, guard(clean))
    clean.train()
    assert len(steps) == 34
    assert not any(fired for fired, _, _ in steps)
    logs = [log for log in clean.state.log_history if "reward" in log]
    assert all((log["reward/whole_range"] > 0) == (log["response/truncated_share"] < 0.7) for log in logs)
    flat = trainer(lambda completions, **_: [1.0] * len(completions), max_steps=17)
    steps = watch(flat, guard(flat))
    flat.train()
    assert [number for number, (fired, _, _) in enumerate(steps, start=1) if "constant-reward" in fired] == [16]


def test_several_updates_of_a_batch_lower_the_rate_once(trainer: Callable[..., Any]) -> None:
    lowers = {"name": "lowers", "rule": "limit", "metric": "reward/mean", "above": 0.0}
    settings = parse_guards({"defaults": False, "guard": [{**lowers, "actions": ["lower_learning_rate", "log"]}]}, "it")
    made = trainer(distinct, num_iterations=2)
    guard(made, Guards(settings, can=CAN))
    made.train()
    assert made.lr_scheduler.base_lrs == pytest.approx([0.5 * made.args.learning_rate] * 2)


def test_guards_go_on_where_a_run_does(trainer: Callable[..., Any]) -> None:
    """Rewards fail at steps 2 and 4 to 7; a checkpoint lies between, and the fifth failure stops the run."""

    def failing(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        rewards = distinct(completions)
        return [float("nan"), *rewards[1:]] if trainer_state.global_step in (1, 3, 4, 5, 6) else rewards

    first = trainer(failing, save_strategy="steps", save_steps=3)
    guard(first, Guards.default(can={"skip"}))
    first.train()
    resumed = trainer(failing, max_steps=8)
    guard(resumed)
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-3"))
    assert resumed.state.global_step == 7


def test_what_the_trainer_cannot_do_is_one_sentence(trainer: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"probe=True needs vllm_mode=.colocate."):
        guard(trainer(distinct), probe=True)
    with pytest.raises(UsageError, match="this object has no _generate_and_score_completions"):
        guard(object())


def test_a_rank_without_a_response_of_two_tokens_probes_with_the_others() -> None:
    assert probed_ids([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1]) == [[5, 6, 7]]
    assert probed_ids([[8, 0, 0, 0], [9, 0, 0, 0]], [1, 0]) == [[8, 8]]
