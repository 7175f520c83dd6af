"""Reward functions of the user's in whole runs: too slow, and of all of a step's responses at once."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import TrainingStopped
from tests.train.quick_runs import quick_home, quick_settings, recorded, train

pytestmark = pytest.mark.filterwarnings("ignore")

FUNCTIONS = """
import threading

ever = threading.Event()

def slow_now_and_then(prompt, response, answer):
    if len(response) % 2:
        ever.wait()
    return 1.0

def of_all(prompts, responses, answers):
    assert len(prompts) == len(responses) == len(answers) == 8
    return [float(len(response) % 2) for response in responses]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (quick_home(tmp_path, monkeypatch) / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    return tmp_path


def task(home: Path, function: str) -> dict[str, Any]:
    return {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": f"functions:{function}"}


@pytest.mark.slow
def test_a_reward_that_comes_too_late_skips_updates_and_ends_the_run_by_its_name(llama: Path, home: Path) -> None:
    late = {**task(home, "slow_now_and_then"), "reward_seconds": 0.05}
    with pytest.raises(TrainingStopped, match=r"The reward function is too slow: for \d+ responses of the last step"):
        train(home / "run", quick_settings(llama, home, 6, task=late))
    steps = recorded(home / "run")
    assert len(steps) == 5
    assert all(step["reward/late"] == step["reward/nonfinite"] > 0 for step in steps)


@pytest.mark.slow
def test_a_function_of_lists_judges_a_step_at_once(llama: Path, home: Path) -> None:
    at_once = {**task(home, "of_all"), "rewards_repeated": 0}
    [step] = train(home / "run", quick_settings(llama, home, 1, task=at_once))
    assert 0 < step["reward/mean"] < 1
    assert step["reward/late"] == step["reward/unrepeated"] == 0
