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
from mismatch_probe.guards.guards import Guards  # noqa: E402
from mismatch_probe.guards.load import parse_guards  # noqa: E402
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
    guard(made)
    before = weights(made)
    made.train()
    assert made.state.global_step == 2
    assert all(torch.equal(*pair) for pair in zip(before, weights(made), strict=True))


def test_several_updates_of_a_batch_are_all_withheld(trainer: Callable[..., Any]) -> None:
    made = trainer(lambda completions, **_: [float("nan")] * len(completions), num_iterations=2)
    guard(made)
    before = weights(made)
    made.train()
    assert made.state.global_step < STEPS
    assert all(torch.equal(*pair) for pair in zip(before, weights(made), strict=True))


def test_several_updates_of_a_batch_lower_the_rate_once(trainer: Callable[..., Any]) -> None:
    lowers = {"name": "lowers", "rule": "limit", "metric": "reward/mean", "above": 0.0}
    settings = parse_guards({"defaults": False, "guard": [{**lowers, "actions": ["lower_learning_rate", "log"]}]}, "it")
    made = trainer(distinct, num_iterations=2)
    guard(made, Guards(settings, can=CAN))
    made.train()
    assert made.lr_scheduler.base_lrs == pytest.approx([0.5 * made.args.learning_rate] * 2)


def test_guards_go_on_where_a_run_does(trainer: Callable[..., Any]) -> None:
    """Rewards fail at steps 2 and 4; between them lies a checkpoint, and the third failure stops the run."""

    def failing(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        rewards = distinct(completions)
        return [float("nan"), *rewards[1:]] if trainer_state.global_step in (1, 3, 4) else rewards

    first = trainer(failing, save_strategy="steps", save_steps=3)
    guard(first, Guards.default(can={"skip"}))
    first.train()
    resumed = trainer(failing)
    guard(resumed)
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-3"))
    assert resumed.state.global_step == 5


def test_what_the_trainer_cannot_do_is_one_sentence(trainer: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"probe=True needs vllm_mode=.colocate."):
        guard(trainer(distinct), probe=True)
    with pytest.raises(UsageError, match="this object has no _generate_and_score_completions"):
        guard(object())


def test_a_rank_without_a_response_of_two_tokens_probes_with_the_others() -> None:
    assert probed_ids([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1]) == [[5, 6, 7]]
    assert probed_ids([[8, 0, 0, 0], [9, 0, 0, 0]], [1, 0]) == [[8, 8]]
