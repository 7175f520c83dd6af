"""A canary on demand: what a step would measure on these weights, and what guards think of it, with nothing changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mismatch_probe.cli.schema import schema_path
from mismatch_probe.cli.train import train as train_command
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.records.training_run import TrainingDirectory
from tests.settings_calls import call
from tests.train.model_engine import ModelEngine
from tests.train.quick_runs import guard_file, quick_home, quick_settings, recorded, train

REWARD = {"task": {"reward": "lengths_as_rewards:even"}}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class OtherWeights(ModelEngine):
    """An engine that a sync leaves with another layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.perturbation = 0.5


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return quick_home(tmp_path, monkeypatch)


def canary(wanted: TrainSettings, capsys: pytest.CaptureFixture[str], out: Path | None = None) -> dict[str, Any]:
    flags = REWARD if out is not None else wanted.model_dump(mode="json", exclude_none=True)
    code = call(train_command, flags, out=out, resume=out is not None, json_output=True, canary=True)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(schema_path("canary").read_text())).validate(document)
    assert code is (ExitCode.GATE_FAILED if document["fired"] else ExitCode.PASS)
    return document


def test_a_model_is_looked_at_without_a_run(llama: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = canary(quick_settings(llama, home, 1), capsys)
    assert found["step"] == 0
    assert found["fired"] == []
    assert found["metrics"]["mismatch/kl_k3"] < 1e-9


def test_the_newest_checkpoint_is_measured_as_the_next_step_would(
    llama: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = quick_settings(llama, home, 2)
    train(home / "run", wanted)
    before = {path: path.read_bytes() for path in (home / "run").rglob("*") if path.is_file()}
    found = canary(wanted, capsys, home / "run")
    assert {path: path.read_bytes() for path in (home / "run").rglob("*") if path.is_file()} == before
    assert found["step"] == 2
    next_step = train(home / "run", quick_settings(llama, home, 3), resume=True)[-1]
    assert {name: next_step[name] for name in found["metrics"]} == found["metrics"]
    assert len(recorded(home / "run")) == 3


def test_an_engine_with_other_weights_is_told_by_the_guards(
    llama: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_home(home, monkeypatch, OtherWeights)
    found = canary(quick_settings(llama, home, 1), capsys)
    assert found["metrics"]["sync/probe_k3"] > 1e-6
    assert found["fired"]


def test_guards_judge_a_canary_on_demand_by_what_the_first_one_of_a_run_is_judged_by(
    llama: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = 'name = "{0}"\nrule = "limit"\nmetric = "{0}"\nabove = -1\npatience = 5\nactions = ["log"]'
    guards = guard_file(home, always.format("policy/entropy"), always.format("mismatch/kl_k3"))
    wanted = quick_settings(llama, home, 1, guards=guards)
    train(home / "run", wanted)
    in_the_run = [event["guard"] for event in TrainingDirectory(home / "run").read_events()]
    assert [event["guard"] for event in canary(wanted, capsys)["fired"]] == in_the_run == ["mismatch/kl_k3"]


def test_a_run_to_write_to_is_refused(llama: Path, home: Path) -> None:
    with pytest.raises(UsageError, match="--canary writes nothing"):
        call(train_command, {}, out=home / "run", canary=True)


def test_a_run_is_looked_at_as_it_was_started(llama: Path, home: Path) -> None:
    train(home / "run", quick_settings(llama, home, 1))
    with pytest.raises(UsageError, match="other settings"):
        call(train_command, {"seed": 1, **REWARD}, out=home / "run", resume=True, canary=True)
