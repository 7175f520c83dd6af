"""What the loop does with what guards say, and what a kill leaves to a resumed run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.records.sequences import SampledSequence, SampleRequest
from mismatch_probe.records.training_run import TrainingDirectory
from tests.train.quick_runs import StoppingEngine, guard_file, quick_home, quick_settings, recorded, train

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


class RestartedEngine(StoppingEngine):
    """Each start of it samples other responses, and longer ones, as an engine in another format may."""

    starts = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        RestartedEngine.starts += 1
        self._start = RestartedEngine.starts

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        longer = sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens + self._start - 1})
        return super().sample([replace(one, seed=one.seed + self._start) for one in requests], longer)


def test_a_side_in_another_precision_is_probed_with_the_same_tokens(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_home(home, monkeypatch, RestartedEngine)
    raising = ALWAYS.replace('["log"]', '["log", "raise_precision(infer)", "log"]')
    wanted = quick_settings(llama, home, 4, guards=guard_file(home, raising), infer_dtype="bf16")
    steps = train(home / "run", wanted)
    assert RestartedEngine.starts == 2
    shifts = [step["update/policy_shift_k3"] for step in steps[1:]]
    assert max(shifts) < 4 * min(shifts)
