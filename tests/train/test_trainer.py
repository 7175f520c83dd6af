"""What the loop does with what guards say, and what a kill leaves to a resumed run."""

from pathlib import Path

import pytest

from mismatch_probe.records.training_run import TrainingDirectory
from tests.train.quick_runs import guard_file, quick_home, quick_settings, recorded, train

pytestmark = pytest.mark.filterwarnings("ignore")

ALWAYS = 'name = "always"\nrule = "limit"\nmetric = "mismatch/kl_k3"\nabove = -1\nactions = ["log"]'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return quick_home(tmp_path, monkeypatch)


def test_what_fired_at_the_canary_is_told_once_though_the_first_steps_are_done_again(llama: Path, home: Path) -> None:
    wanted = quick_settings(llama, home, 1, guards=guard_file(home, ALWAYS), checkpoint={"every": 9})
    train(home / "run", wanted)
    directory = TrainingDirectory(home / "run")
    assert [event["step"] for event in directory.read_events()] == [1]
    directory.forget_after(0)
    assert directory.read_events() == []
    assert recorded(home / "run") == []
