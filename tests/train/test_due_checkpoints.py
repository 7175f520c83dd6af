"""When a checkpoint is taken: a guard may put it off, and must not keep a run from ever having one."""

from pathlib import Path

import pytest

from mismatch_probe.train.checkpoints import Checkpoints
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

ALWAYS = 'name = "always"\nrule = "limit"\nmetric = "mismatch/kl_k3"\nabove = -1\n'


def checkpoints_of(actions: str, llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of all checkpoints that a run of seven steps took, one every two where nothing is amiss."""
    quick_home(home, monkeypatch)
    taken: list[int] = []
    save = Checkpoints.save

    def watched(self: Checkpoints, step: int, *given: object) -> None:
        taken.append(step)
        save(self, step, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoints, "save", watched)
    guards = guard_file(home, f"{ALWAYS}actions = {actions}")
    train(home / "run", quick_settings(llama, home, 7, guards=guards, checkpoint={"every": 2}))
    return taken


@pytest.mark.slow
@pytest.mark.parametrize(
    "actions", ['["log"]', '["switch_correction(seq-mis)"]', '["resync"]', '["tighten_sequences(0.9)"]']
)
def test_a_guard_that_fires_at_every_step_and_lets_it_learn_keeps_no_checkpoint_from_being_taken(
    actions: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints_of(actions, llama, tmp_path, monkeypatch) == [0, 2, 4, 6, 7]


@pytest.mark.slow
def test_a_checkpoint_put_off_is_taken_at_the_next_step_that_nothing_is_held_against(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints_of('["log", "skip_update", "log"]', llama, tmp_path, monkeypatch) == [0, 3, 4, 6, 7]
