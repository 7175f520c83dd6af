"""A rollback goes back to weights that were judged and found good, however long the breach has lasted."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import TrainingStopped
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rules import parse_guards
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.optimizer import TrainedNetwork
from tests.train.quick_runs import guard_file, quick_home, quick_settings, recorded, train

pytestmark = pytest.mark.filterwarnings("ignore")

REWARDS = """
import itertools
count = itertools.count()

def two_steps(prompt, response, answer):
    place = next(count)
    return 0.75 + place / 64 if place < 16 else 0.0
"""
POOR = 'name = "poor"\nrule = "limit"\nmetric = "reward/mean"\nbelow = 0.5\npatience = 2\n'


def checkpoints_gone_back_to(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the step of every checkpoint that is loaded."""
    loaded_steps: list[int] = []
    load = Checkpoints.load

    def watched(self: Checkpoints, step: int, trained: Mapping[str, TrainedNetwork]) -> dict[str, Any]:
        loaded_steps.append(step)
        return load(self, step, trained)

    monkeypatch.setattr(Checkpoints, "load", watched)
    return loaded_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "loaded_steps"),
    [
        ('["rollback", "log"]', [0]),
        ('["log", "rollback", "log"]', [0]),
        ('["raise_precision(infer)", "rollback", "log"]', [4, 0]),
    ],
)
def test_weights_that_broke_a_rule_while_its_guard_was_patient_are_not_gone_back_to(
    actions: str, loaded_steps: list[int], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are good, and best, in steps 1 and 2; a checkpoint is taken after each step."""
    home = quick_home(tmp_path, monkeypatch)
    (home / "rewards_of_two_steps.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "rewards_of_two_steps", raising=False)
    task = {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": "rewards_of_two_steps:two_steps"}
    task |= {"rewards_repeated": 0, "reward_workers": 1}
    guards = guard_file(home, f"{POOR}actions = {actions}")
    loaded = checkpoints_gone_back_to(monkeypatch)
    given = {"task": task, "checkpoint": {"every": 1}, "guards": guards, "infer_dtype": "bf16"}
    train(home / "run", quick_settings(llama, home, 8, **given))
    assert loaded == loaded_steps
    assert 8 in Checkpoints(home / "run" / "checkpoints", keep=2).steps()


@pytest.mark.parametrize(
    ("actions", "doubted_since"),
    [
        (["warn"], [None, None, None, None]),
        (["rollback"], [None, 2, 2, None]),
        (["rollback", "log"], [None, 2, 2, None]),
        (["warn", "rollback"], [None, 2, 2, None]),
    ],
)
def test_weights_are_doubted_from_the_first_broken_step_of_a_guard_that_may_roll_back(
    actions: list[str], doubted_since: list[int | None]
) -> None:
    guard = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "patience": 2, "actions": actions}
    book = GuardBook(parse_guards({"defaults": False, "guard": [guard]}, "guards.toml"))
    doubts = []
    for step, value in enumerate([0, 2, 2, 0], start=1):
        book.evaluate(step, {"m": value})
        doubts.append(book.doubted_since)
    assert doubts == doubted_since


def test_a_guard_that_has_rolled_back_and_now_only_tells_doubts_no_more() -> None:
    guard = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": ["rollback", "log"]}
    book = GuardBook(parse_guards({"defaults": False, "guard": [guard]}, "guards.toml"))
    doubts = []
    for step in (1, 2, 3):
        book.evaluate(step, {"m": 2.0})
        doubts.append(book.doubted_since)
    assert doubts == [1, None, None]


SLOW = 'name = "slow"\nrule = "limit"\nmetric = "reward/mean"\nabove = 2\npatience = 4\nactions = ["rollback"]\n'
LATE = 'name = "late"\nrule = "limit"\nmetric = "reward/mean"\nbelow = 0.5\n'


def good_until(steps: int, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A task whose rewards are 1 in so many steps of eight responses, and 0 after."""
    rewards = "import itertools\ncount = itertools.count()\n"
    rewards += f"def late(prompt, response, answer):\n    return float(next(count) < {8 * steps})\n"
    (home / "rewards_until.py").write_text(rewards, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "rewards_until", raising=False)
    task = {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": "rewards_until:late"}
    return task | {"rewards_repeated": 0, "reward_workers": 1}


@pytest.mark.slow
def test_a_checkpoint_that_a_fault_was_in_before_it_was_seen_is_not_gone_back_to(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is in the update of step 6 and in its checkpoint, and is seen at step 8; the second rollback goes
    further back than the first."""
    home = quick_home(tmp_path, monkeypatch)
    task = good_until(7, home, monkeypatch)
    guards = guard_file(home, f'{LATE}actions = ["rollback", "rollback", "log"]', SLOW)
    loaded = checkpoints_gone_back_to(monkeypatch)
    train(home / "run", quick_settings(llama, home, 9, task=task, checkpoint={"every": 3}, guards=guards))
    assert loaded == [3, 0]
    assert [step.get("guards/rolled_back_to") for step in recorded(home / "run")][7:] == [3, 0]


@pytest.mark.slow
def test_a_run_that_is_resumed_before_the_fault_is_seen_goes_back_as_far(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    guards = guard_file(home, f'{LATE}actions = ["rollback", "log"]', SLOW)
    given = {"task": good_until(7, home, monkeypatch), "checkpoint": {"every": 3}, "guards": guards}
    train(home / "run", quick_settings(llama, home, 6, **given))
    loaded = checkpoints_gone_back_to(monkeypatch)
    monkeypatch.delitem(sys.modules, "rewards_until", raising=False)
    good_until(1, home, monkeypatch)
    train(home / "run", quick_settings(llama, home, 8, **given), resume=True)
    assert loaded == [6, 3]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_good_checkpoint_is_always_there_whatever_is_kept(
    every: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that are there are few."""
    home = quick_home(tmp_path, monkeypatch)
    rollbacks: list[tuple[int, list[int]]] = []
    save = Checkpoints.save

    def watched(self: Checkpoints, step: int, *given: Any) -> None:
        save(self, step, *given)
        rollbacks.append((given[-1]["last_good_step"], self.steps()))

    monkeypatch.setattr(Checkpoints, "save", watched)
    given = {
        "checkpoint": {"every": every},
        "guards": guard_file(home, SLOW),
        "rollout": {"prompts": 1, "samples": 2, "max_new_tokens": 2},
    }
    train(home / "run", quick_settings(llama, home, 16, **given))
    for good, steps in rollbacks:
        assert min(steps) <= good, (good, steps)
        assert len(steps) <= 2 + 4
    good, steps = rollbacks[-1]
    assert good == 12
    assert max(step for step in steps if step <= good) >= 12 - 4 - every


@pytest.mark.slow
def test_a_run_that_is_stopped_after_its_rollbacks_is_resumed_from_a_good_checkpoint(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    guards = guard_file(home, f'{LATE}actions = ["rollback", "stop"]', SLOW)
    given = {"task": good_until(7, home, monkeypatch), "checkpoint": {"every": 3}, "guards": guards}
    with pytest.raises(TrainingStopped):
        train(home / "run", quick_settings(llama, home, 12, **given))
    assert Checkpoints(home / "run" / "checkpoints", keep=2).steps() == [0]


def answered(guards: Guards, values: Sequence[float], first: int = 1) -> list[tuple[bool, int]]:
    """Of each step, whether a rollback is asked for, and the last step whose checkpoint is good."""
    decisions = [guards.observe(metrics={"m": value}, step=step) for step, value in enumerate(values, start=first)]
    return [(decision.rollback, decision.last_good_step) for decision in decisions]


def rolling_back(patience: int = 1) -> Guards:
    actions = {"patience": patience, "actions": ["rollback"]}
    tables = [{"name": "g", "rule": "limit", "metric": "m", "above": 1, **actions}]
    return Guards(parse_guards({"defaults": False, "guard": tables}, "guards.toml"), can={"rollback"})


def test_a_decision_says_after_which_step_a_checkpoint_is_good() -> None:
    """Of a guard that needs three steps to ask for a rollback, in a loop from step 1 and in one from step 101."""
    assert answered(rolling_back(3), [0] * 5) == [(False, 0), (False, 0), (False, 0), (False, 1), (False, 2)]
    assert answered(rolling_back(3), [0] * 5, first=101)[-1] == (False, 102)


def test_a_second_rollback_goes_further_back_unless_enough_clean_steps_come_between() -> None:
    guards = rolling_back()
    assert answered(guards, [0, 0, 0, 2]) == [(False, 0), (False, 1), (False, 2), (True, 2)]
    guards.went_back(2)
    assert answered(guards, [2], first=5) == [(True, 1)]
    guards.went_back(1)
    assert answered(guards, [0, 0, 0, 2], first=6)[-1] == (True, 7)


def test_a_loop_that_does_not_say_where_it_went_is_told_to_go_further_back_too() -> None:
    assert answered(rolling_back(), [0, 0, 0, 2, 2, 2])[3:] == [(True, 2), (True, 1), (True, 0)]


def test_no_rollback_goes_behind_the_weights_that_a_run_began_with() -> None:
    assert answered(rolling_back(), [2, 2, 2]) == [(True, 0)] * 3
    assert answered(rolling_back(), [2, 2], first=101) == [(True, 100)] * 2


def test_guards_that_are_restored_go_back_as_far() -> None:
    guards, restored = rolling_back(3), rolling_back(3)
    answered(guards, [0] * 8)
    restored.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert answered(guards, [2] * 3, first=9) == answered(restored, [2] * 3, first=9)
    assert answered(restored, [2], first=12) == [(False, 4)]


@pytest.mark.slow
def test_a_rate_that_was_lowered_after_a_rollback_comes_back_in_a_clean_run_and_in_one_that_is_resumed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    once = 'name = "once"\nrule = "limit"\nmetric = "optim/learning_rate"\nabove = 9e-5\nwarmup = 2\n'
    guards = guard_file(home, f'{once}actions = [["rollback", "lower_learning_rate(0.4)"], "log"]')
    few = {"prompts": 1, "samples": 2, "max_new_tokens": 2}
    given = {"guards": guards, "rollout": few, "checkpoint": {"every": 4}}
    train(home / "whole", quick_settings(llama, home, 23, **given))
    train(home / "resumed", quick_settings(llama, home, 9, **given))
    train(home / "resumed", quick_settings(llama, home, 23, **given), resume=True)
    rates = [step["optim/learning_rate"] for step in recorded(home / "whole")]
    assert rates == [step["optim/learning_rate"] for step in recorded(home / "resumed")]
    assert rates == pytest.approx([1e-4] * 3 + [4e-5] * 10 + [8e-5] * 10)


def test_a_step_that_lacks_what_a_guard_reads_makes_no_checkpoint_good() -> None:
    guards = rolling_back(2)
    given = [{"m": 0.0}, {}, {}, {"m": 0.0}, {"m": 0.0}]
    with pytest.warns(UserWarning, match="lacks"):
        last_good_steps = [
            guards.observe(metrics=metrics, step=step).last_good_step for step, metrics in enumerate(given, 1)
        ]
    assert last_good_steps == [0, 0, 0, 0, 3]
