"""The names that guards are checked against are those a run records, and a mistaken one is refused before any start."""

from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.preparation import prepare_training, recorded_metrics
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

AFTER_GUARDS = {"time/guards_seconds", "time/update_seconds"}
GUARD = 'name = "own"\nrule = "limit"\nmetric = "{metric}"\nabove = 1\nactions = ["warn"]'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return quick_home(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "has_critic"), [("pg-seq-is", False), ("ppo", True)])
def test_a_run_records_these_names_and_no_others(objective: str, has_critic: bool, llama: Path, home: Path) -> None:
    train(home / "run", quick_settings(llama, home, 1, objective={"name": objective}))
    [(_, metrics)] = TrainingDirectory(home / "run").read_metrics()
    assert set(metrics) - AFTER_GUARDS == recorded_metrics(has_critic=has_critic)


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("mismatch/kl_k4", "did you mean 'mismatch/kl_k[13]'"),
        ("critic/value_loss", "no step gives"),
        ("time/update_seconds", "no step gives"),
    ],
)
def test_a_guard_on_a_metric_that_no_step_gives_is_refused_before_the_engine_starts(
    metric: str, meant: str, llama: Path, home: Path
) -> None:
    guards = guard_file(home, GUARD.format(metric=metric))
    with pytest.raises(UsageError, match=meant):
        prepare_training(quick_settings(llama, home, 1, guards=guards))


def test_a_floor_that_no_canary_measures_is_refused_before_the_engine_starts(llama: Path, home: Path) -> None:
    floor = 'name = "own"\nrule = "floor"\nmetric = "{metric}"\ntimes = 2\nactions = ["warn"]'
    guards = guard_file(home, floor.format(metric="reward/mean"))
    with pytest.raises(UsageError, match="relative to the canary's 'reward/mean', which no canary measures"):
        prepare_training(quick_settings(llama, home, 1, guards=guards))
    prepare_training(quick_settings(llama, home, 1, guards=guard_file(home, floor.format(metric="sync/probe_k3"))))


def test_a_guard_on_the_critic_is_taken_where_there_is_one(llama: Path, home: Path) -> None:
    guards = guard_file(home, GUARD.format(metric="critic/value_loss"))
    preparation = prepare_training(quick_settings(llama, home, 1, guards=guards, objective={"name": "ppo"}))
    assert "own" in [guard.name for guard in preparation.guards]
