"""What the loop does with what guards say, and what a kill leaves to a resumed run."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, TrainingStopped, UsageError
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.records.sequences import SampledSequence, SampleRequest
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.objectives.losses import Update
from mismatch_probe.train.optimizer import Updater
from tests.train.quick_runs import StoppingEngine, guard_file, quick_home, quick_settings, recorded, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

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


@pytest.mark.parametrize("metric", ["time/step_seconds", "time/sample_seconds", "time/tokens_per_second"])
def test_a_guard_may_watch_how_long_a_step_takes(metric: str, llama: Path, home: Path) -> None:
    guards = guard_file(home, ALWAYS.replace("mismatch/kl_k3", metric).replace("-1", "0"))
    train(home / "run", quick_settings(llama, home, 1, guards=guards))
    [event] = TrainingDirectory(home / "run").read_events()
    assert event["value"] > 0


def test_a_resumed_run_that_stops_is_diagnosed_by_the_steps_before_it_was_killed(llama: Path, home: Path) -> None:
    stopping = ALWAYS.replace('["log"]', '["log", "log", "log", "stop"]')
    wanted = quick_settings(llama, home, 4, guards=guard_file(home, stopping))
    with pytest.raises(TrainingStopped) as error_of_run:
        train(home / "whole", wanted)
    killed = quick_settings(llama, home, 3, guards=wanted.guards)
    train(home / "killed", killed)
    shutil.rmtree(home / "killed" / "checkpoints" / "step-000003")
    with pytest.raises(TrainingStopped) as resumed:
        train(home / "killed", wanted, resume=True)
    assert str(resumed.value) == str(error_of_run.value)
    assert str(error_of_run.value).count("KL (k3) is") == 3


def test_a_step_records_what_came_of_a_resync_and_where_a_rollback_went(llama: Path, home: Path) -> None:
    answers = ALWAYS.replace('["log"]', '["log", "resync", ["rollback", "resync"], "log"]')
    wanted = quick_settings(llama, home, 4, guards=guard_file(home, answers), checkpoint={"every": 1})
    train(home / "run", wanted)
    steps = recorded(home / "run")
    assert ["resync/probe_k3" in step for step in steps] == [False, True, True, False]
    assert all(step["resync/probe_k3"] == step["sync/probe_k3"] for step in steps[1:3])
    assert [step.get("guards/rolled_back_to") for step in steps] == [None, None, 0, None]


def test_a_rollback_to_what_cannot_be_read_removes_nothing(llama: Path, home: Path) -> None:
    guards = guard_file(home, ALWAYS.replace('["log"]', '["log", "log", "log", "rollback"]'))
    train(home / "run", quick_settings(llama, home, 3, guards=guards, checkpoint={"every": 1, "keep": 9}))
    kept = sorted(path.name for path in (home / "run" / "checkpoints").iterdir())
    shutil.rmtree(home / "run" / "checkpoints" / kept[0] / "state")
    with pytest.raises(BrokenRecord):
        train(
            home / "run", quick_settings(llama, home, 4, guards=guards, checkpoint={"every": 1, "keep": 9}), resume=True
        )
    assert sorted(path.name for path in (home / "run" / "checkpoints").iterdir()) == kept


def test_what_a_resume_would_change_is_named(llama: Path, home: Path) -> None:
    train(home / "run", quick_settings(llama, home, 1))
    changed = quick_settings(llama, home, 2, optimizer={"learning_rate": 1e-3}, seed=1)
    with pytest.raises(UsageError, match=r"other settings \(optimizer.learning_rate, seed\)"):
        train(home / "run", changed, resume=True)


def test_fewer_steps_than_were_taken_are_refused(llama: Path, home: Path) -> None:
    train(home / "run", quick_settings(llama, home, 2))
    with pytest.raises(UsageError, match="has taken 2 steps, and --steps asks for 1; give at least 2"):
        train(home / "run", quick_settings(llama, home, 1), resume=True)
    train(home / "run", quick_settings(llama, home, 2), resume=True)


def rates_of_updates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Filled with the rate of every update that guards leave to the optimizer."""
    rates: list[float] = []
    apply = Updater.step

    def counted(self: Updater, step: int, factor: float) -> None:
        rates.append(factor * self.trained["policy"].optimizer.learning_rate(step))
        apply(self, step, factor)

    monkeypatch.setattr(Updater, "step", counted)
    return rates


TWO_UPDATES = {"prompts": 4, "samples": 2, "max_new_tokens": 4, "updates": 2}
EACH_UPDATE = 'name = "norm"\nrule = "limit"\nmetric = "optim/grad_norm"\nabove = -1\npatience = 2\n'


@pytest.mark.parametrize(
    ("actions", "rates"),
    [
        ('["skip_update"]', [1e-4]),
        ('["lower_learning_rate(0.5)"]', [1e-4, 5e-5]),
        ('["stop"]', [1e-4]),
        ('["rollback"]', [1e-4]),
        ('["warn"]', [1e-4, 1e-4]),
    ],
)
def test_guards_are_asked_before_a_later_update_too(
    actions: str, rates: list[float], llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = rates_of_updates(monkeypatch)
    guards = guard_file(home, f"{EACH_UPDATE}actions = {actions}")
    wanted = quick_settings(llama, home, 1, guards=guards, rollout=TWO_UPDATES)
    with pytest.raises(TrainingStopped) if "stop" in actions else nullcontext():
        train(home / "run", wanted)
    assert applied == pytest.approx(rates)
    [event] = TrainingDirectory(home / "run").read_events()
    assert (event["step"], event["guard"]) == (1, "norm")


def test_a_later_update_is_not_asked_of_what_only_a_step_has(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = rates_of_updates(monkeypatch)
    guards = guard_file(home, EACH_UPDATE.replace("optim/grad_norm", "reward/mean") + 'actions = ["skip_update"]')
    wanted = quick_settings(llama, home, 2, guards=guards, rollout=TWO_UPDATES)
    train(home / "run", wanted)
    assert len(applied) == 2
    assert [event["step"] for event in TrainingDirectory(home / "run").read_events()] == [2]


def test_a_correction_switched_to_at_a_later_update_holds_for_it(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[str] = []
    accumulate = Updater.accumulate

    def watched(self: Updater, update: Update, *given: Any) -> Metrics:
        learnt.append(update.plan.objective.correction.action)
        return accumulate(self, update, *given)

    monkeypatch.setattr(Updater, "accumulate", watched)
    guards = guard_file(home, EACH_UPDATE + 'actions = ["switch_correction(seq-mis)"]')
    train(home / "run", quick_settings(llama, home, 1, guards=guards, rollout=TWO_UPDATES))
    assert learnt == ["weigh", "weigh", "mask"]


class RestartedEngine(StoppingEngine):
    """Each start of it samples other responses, and longer ones, as an engine in another format may."""

    starts = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        RestartedEngine.starts += 1
        self._start = RestartedEngine.starts

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        longer = sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens + self._start - 1})
        return super().sample([replace(request, seed=request.seed + self._start) for request in requests], longer)


def test_a_side_in_another_precision_is_probed_with_the_same_tokens(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_home(home, monkeypatch, RestartedEngine)
    raising = ALWAYS.replace('["log"]', '["log", "raise_precision(infer)", "log"]')
    wanted = quick_settings(llama, home, 4, guards=guard_file(home, raising), infer_dtype=Dtype.BF16)
    steps = train(home / "run", wanted)
    assert RestartedEngine.starts == 2
    shifts = [step["update/policy_shift_k3"] for step in steps[1:]]
    assert max(shifts) < 4 * min(shifts)
