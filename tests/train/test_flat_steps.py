"""A step that nothing can be learnt from changes nothing: AdamW moves weights by its momentum otherwise."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.checkpoints import Checkpoints
from tests.train.quick_runs import quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

TURNS_FLAT = """
calls = 0

def at_first(prompt, response, answer):
    global calls
    calls += 1
    return float(len(response) % 2 == 0) if calls <= 8 else 0.5
"""


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    path = Checkpoints(TrainingDirectory(run).checkpoints_path, keep=9).model_path(step)
    return load_file(path / "model.safetensors")


@pytest.mark.slow
def test_weights_stay_where_all_rewards_are_equal(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = quick_home(tmp_path, monkeypatch)
    (home / "turns_flat.py").write_text(TURNS_FLAT, encoding="utf-8")
    changes = {
        "task": {
            "source": str(home / "problems.jsonl"),
            "num_problems": 8,
            "reward": "turns_flat:at_first",
            "reward_workers": 1,
            "rewards_repeated": 0,
        },
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        "checkpoint": {"every": 1, "keep": 9},
    }
    steps = train(home / "run", quick_settings(llama, home, 3, **changes))
    norms = [step["optim/grad_norm"] for step in steps]
    assert norms[0] > 0
    assert norms[1:] == [0, 0]
    before, first, later = (weights(home / "run", step) for step in (0, 1, 3))
    assert any(not torch.equal(before[name], first[name]) for name in before)
    assert all(torch.equal(first[name], later[name]) for name in first)
