"""Which checkpoints stay: the newest ones, and the one whose steps earned most."""

import json
from pathlib import Path

import pytest

from mismatch_probe.train.checkpoints import Checkpoints
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

LOGS = 'name = "logs"\nrule = "limit"\nmetric = "reward/mean"\nabove = 2\nactions = ["log"]'
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose rewards by chance earn most of all in its first steps."""
    home = quick_home(tmp_path, monkeypatch)
    rewards = "import itertools\ncount = itertools.count()\n"
    rewards += "def early(prompt, response, answer):\n    return float(next(count) < 16)\n"
    (home / "early_rewards.py").write_text(rewards, encoding="utf-8")
    task = {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": "early_rewards:early"}
    kept = {"every": 2, "keep": 2}
    train(home / "run", quick_settings(llama, home, 8, task=task, checkpoint=kept, guards=guard_file(home, LOGS)))
    return home / "run"


@pytest.mark.slow
def test_the_best_checkpoint_stays_beside_the_newest(run: Path) -> None:
    """A reward is of the policy before its step's update: steps 1 and 2 are of the weights that the run began with."""
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    assert checkpoints.steps() == [0, 6, 8]
    assert checkpoints.best() == 0


@pytest.mark.slow
def test_a_killed_run_still_knows_its_best_checkpoint(run: Path) -> None:
    kept = Checkpoints(run / "checkpoints", keep=2)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{step:06d}" for step in kept.steps()}
    file = run / "checkpoints" / "step-000008" / "trainer.json"
    rest = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**rest, "earned": {**rest["earned"], "8": [2.0]}}), encoding="utf-8")
    assert kept.best() == 8


@pytest.mark.slow
def test_what_a_kill_left_of_a_checkpoint_is_removed_with_the_next_one(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    train(home / "run", quick_settings(llama, home, 2))
    folder = home / "run" / "checkpoints"
    for step in (0, 3):
        (folder / f".writing-step-{step:06d}" / "model").mkdir(parents=True)
    train(home / "run", quick_settings(llama, home, 4), resume=True)
    assert [path.name for path in folder.glob(".*")] == []


@pytest.mark.slow
def test_a_copy_that_the_user_made_beside_the_checkpoints_is_none_of_them(run: Path) -> None:
    folder = run / "checkpoints"
    for name in ("step-000006-mine", "step-", "step-000004.tar"):
        (folder / name).mkdir()
    assert Checkpoints(folder, keep=2).steps() == [0, 6, 8]
