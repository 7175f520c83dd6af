"""What is in no loss is counted: truncated responses that are masked, and those that a guard drops."""

from pathlib import Path

import pytest

from tests.train.model_engine import ModelEngine
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

TIGHTENS = (
    'name = "g"\nrule = "limit"\nmetric = "mismatch/kl_k3"\nabove = -1\nactions = ["tighten_sequences(0.5)", "log"]'
)


@pytest.mark.parametrize(("truncated", "share"), [("masked", 1.0), ("wrong", 0.0)])
def test_truncated_responses_that_are_masked_are_counted(
    truncated: str, share: float, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch, ModelEngine)
    task = {"source": str(home / "problems.jsonl"), "reward": "lengths_as_rewards:even", "truncated": truncated}
    [step] = train(home / "run", quick_settings(llama, home, 1, task=task))
    assert step["response/truncated_share"] == 1
    assert step["correction/excluded_share"] == share


def test_responses_beyond_the_bound_of_a_guard_are_counted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    wanted = quick_settings(llama, home, 2, guards=guard_file(home, TIGHTENS), train_dtype="bf16")
    before, after = train(home / "run", wanted)
    assert before["correction/excluded_share"] == 0
    assert 0 < after["correction/excluded_share"] < 1


def test_a_guard_that_tightens_at_every_step_leaves_responses_to_learn_from(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    always = TIGHTENS.replace(', "log"', "")
    guards = guard_file(home, f"{always}\nwarmup = 1")
    steps = train(home / "run", quick_settings(llama, home, 12, guards=guards, infer_dtype="bf16"))
    assert max(step["correction/excluded_share"] for step in steps) < 1
