"""A run that cannot start leaves nothing behind; one that has begun keeps what it has."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli.train import sanity, train
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import SanitySettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord, TrainingDirectory
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import start_training
from mismatch_probe.train.sanity import prepare_sanity
from tests.settings_calls import call

pytestmark = pytest.mark.slow

COMMANDS = [train, sanity]
SANITY = SanitySettings()
FLAGS = {"model": {"path": "demo"}, "task": {"source": "sums:easy", "num_problems": 32}}


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("vLLM knows no such argument")

    monkeypatch.setattr("mismatch_probe.train.parts.start_engine", refuse)


@pytest.mark.usefixtures("refusing", "process_group")
@pytest.mark.parametrize("run", COMMANDS)
def test_what_the_engine_refuses_leaves_no_run_behind(run: Callable[..., Any], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="no such argument"):
            call(run, FLAGS, out=tmp_path / "run")
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("run", COMMANDS)
def test_a_tracker_that_is_not_installed_leaves_no_run_behind_and_no_word_of_one(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtra, match="--report-to trackio needs a package"):
        call(run, {**FLAGS, "report_to": ["trackio"]}, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    assert "Continue with" not in capsys.readouterr().err


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("run", COMMANDS)
def test_a_run_that_another_process_is_starting_is_left_as_it_is(run: Callable[..., Any], tmp_path: Path) -> None:
    directory = SanityDirectory(tmp_path / "run")
    settings = parse_settings(TrainSettings, FLAGS)
    start_training(directory.path, prepare_training(settings) if run is train else prepare_sanity(settings, SANITY))
    if run is sanity:
        directory.write_sanity(SanityRecord(settings=SANITY))
    before = directory.manifest_path.read_bytes()
    with directory.lock(), pytest.raises(UsageError, match="being written by another process"):
        call(run, {"steps": 7}, out=directory.path, resume=True)
    assert directory.manifest_path.read_bytes() == before


@pytest.mark.usefixtures("refusing", "process_group")
def test_a_run_with_a_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    start_training(path, prepare_training(parse_settings(TrainSettings, FLAGS)))
    (path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="no such argument"):
        call(train, FLAGS, out=path, resume=True)
    assert TrainingDirectory(path).is_run
