"""A rollback goes back to weights that were judged and found good, however long the breach has lasted."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.load import parse_guards
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.updater import Trained
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

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
    found: list[int] = []
    load = Checkpoints.load

    def watched(self: Checkpoints, step: int, trained: Mapping[str, Trained]) -> dict[str, Any]:
        found.append(step)
        return load(self, step, trained)

    monkeypatch.setattr(Checkpoints, "load", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "loaded_steps"),
    [
        ('["rollback", "log"]', [1]),
        ('["log", "rollback", "log"]', [1]),
        ('["raise_precision(infer)", "rollback", "log"]', [4, 1]),
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
    found = []
    for step, value in enumerate([0, 2, 2, 0], start=1):
        book.evaluate(step, {"m": value})
        found.append(book.doubted_since)
    assert found == doubted_since


def test_a_guard_that_has_rolled_back_and_now_only_tells_doubts_no_more() -> None:
    guard = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": ["rollback", "log"]}
    book = GuardBook(parse_guards({"defaults": False, "guard": [guard]}, "guards.toml"))
    found = []
    for step in (1, 2, 3):
        book.evaluate(step, {"m": 2.0})
        found.append(book.doubted_since)
    assert found == [1, None, None]
