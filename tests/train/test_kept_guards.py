"""A run that goes on keeps the guards it was started with, whatever has become of their file or of the defaults."""

from pathlib import Path

import pytest

from mismatch_probe.cli.train import kept_guards
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import resume_training, start_training

OWN = """
[[guard]]
name = "slow"
rule = "cusum"
metric = "mismatch/kl_k3"
spread = 1
actions = ["warn", ["skip_update", "lower_learning_rate(0.3)"]]
"""


def settings(guards: Path | None = None) -> TrainSettings:
    return parse_settings(TrainSettings, {"model": {"path": "demo"}, "task": {"num_problems": 4}, "guards": guards})


@pytest.fixture
def run(tmp_path: Path) -> TrainingDirectory:
    return TrainingDirectory(tmp_path / "run")


@pytest.mark.slow
def test_defaults_of_another_version_do_not_end_a_run(run: TrainingDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    start_training(run.path, prepare_training(settings()))
    monkeypatch.setattr("mismatch_probe.train.preparation.DEFAULT_GUARDS", DEFAULT_GUARDS[1:])
    kept = kept_guards({}, None, run)
    assert kept == DEFAULT_GUARDS
    resume_training(run.path, prepare_training(settings(), kept))
    with pytest.raises(UsageError, match="other guards"):
        resume_training(run.path, prepare_training(settings()))


@pytest.mark.slow
def test_the_guards_of_a_file_are_kept_without_it(run: TrainingDirectory, tmp_path: Path) -> None:
    file = tmp_path / "guards.toml"
    file.write_text(OWN)
    started = prepare_training(settings(file))
    start_training(run.path, started)
    file.unlink()
    kept = kept_guards({}, None, run)
    assert kept == started.guards
    resume_training(run.path, prepare_training(settings(file), kept))


@pytest.mark.slow
def test_guards_that_are_named_again_must_be_the_same(run: TrainingDirectory, tmp_path: Path) -> None:
    file = tmp_path / "guards.toml"
    file.write_text(OWN)
    start_training(run.path, prepare_training(settings(file)))
    file.write_text(OWN.replace("spread = 1", "spread = 2"))
    assert kept_guards({"guards": file}, None, run) is None
    with pytest.raises(UsageError, match="other guards"):
        resume_training(run.path, prepare_training(settings(file)))
    configuration = tmp_path / "train.toml"
    configuration.write_text(f'guards = "{file}"\n')
    assert kept_guards({}, configuration, run) is None
