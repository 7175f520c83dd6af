"""PPO through the whole trainer: the critic learns beside the policy, and a resumed run is the uninterrupted one."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.train import TrainSettings
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.optimizer import Optimizer, TrainedNetwork
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

GUARDS_THAT_LET_PASS = 'name = "never"\nrule = "limit"\nmetric = "reward/mean"\nabove = 9\nactions = ["log"]'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return quick_home(tmp_path, monkeypatch)


def settings(llama: Path, home: Path, steps: int, **changes: Any) -> TrainSettings:
    own = {"objective": {"name": "ppo"}, "critic": {"learning_rate": 1e-3}}
    return quick_settings(llama, home, steps, **{**own, **changes})


@pytest.mark.slow
def test_a_critic_learns_beside_the_policy(llama: Path, home: Path) -> None:
    steps = train(home / "run", settings(llama, home, 3))
    assert steps[0]["critic/value_mean"] == pytest.approx(steps[0]["reward/mean"])
    assert steps[0]["critic/explained_variance"] == 0
    assert all(step["critic/explained_variance"] != 0 for step in steps[1:])
    for step in steps:
        assert step["critic/value_loss"] > 0
        assert step["critic/grad_norm"] > 0
        assert step["critic/learning_rate"] == 1e-3
        assert step["optim/learning_rate"] == 1e-4


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_step_for_step(llama: Path, home: Path) -> None:
    complete_run = train(home / "whole", settings(llama, home, 4))
    train(home / "parts", settings(llama, home, 2))
    assert train(home / "parts", settings(llama, home, 4), resume=True) == complete_run


@pytest.mark.slow
def test_a_resume_that_forgot_its_critic_would_be_another_run(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_run = train(home / "whole", settings(llama, home, 3))
    train(home / "parts", settings(llama, home, 2))
    load = Checkpoints.load

    def load_policy_alone(self: Checkpoints, step: int, trained: Mapping[str, TrainedNetwork]) -> dict[str, Any]:
        return load(self, step, {"policy": trained["policy"]})

    monkeypatch.setattr(Checkpoints, "load", load_policy_alone)
    last = train(home / "parts", settings(llama, home, 3), resume=True)[-1]
    assert last["critic/explained_variance"] == 0 != complete_run[-1]["critic/explained_variance"]


@pytest.mark.slow
def test_two_updates_of_a_rollout_move_both_twice(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[float] = []
    step = Optimizer.step

    def counted(self: Optimizer, learning_rate: float) -> None:
        applied.append(learning_rate)
        step(self, learning_rate)

    monkeypatch.setattr(Optimizer, "step", counted)
    rollout = {"prompts": 4, "samples": 2, "max_new_tokens": 4, "updates": 2}
    train(home / "run", settings(llama, home, 1, rollout=rollout))
    assert applied == [1e-4, 1e-3, 1e-4, 1e-3]


@pytest.mark.slow
def test_rewards_that_are_no_numbers_move_neither(llama: Path, home: Path) -> None:
    wanted = settings(llama, home, 2, guards=guard_file(home, GUARDS_THAT_LET_PASS))
    task = wanted.task.model_copy(update={"reward": "lengths_as_rewards:undefined"})
    steps = train(home / "run", wanted.model_copy(update={"task": task}))
    for step in steps:
        assert step["critic/grad_norm"] == step["optim/grad_norm"] == 0
        assert step["correction/excluded_share"] == 1
    assert math.isnan(steps[1]["critic/value_mean"]), "of tokens in the loss, and there is none"
    assert steps[1]["update/policy_shift_k3"] == 0


@pytest.mark.slow
def test_an_objective_without_a_critic_records_none(llama: Path, home: Path) -> None:
    (step,) = train(home / "run", settings(llama, home, 1, objective={"name": "grpo"}))
    assert not [name for name in step if name.startswith("critic/")]
