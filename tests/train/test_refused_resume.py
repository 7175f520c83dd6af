"""A run that goes on and is refused keeps its folder, with whatever else lies in it."""

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mismatch_probe.cli.train import train
from mismatch_probe.errors import BrokenRecord, RunDirectoryError, UsageError
from mismatch_probe.train.preparation import TrainingPreparation, prepare_training
from mismatch_probe.train.run import resume_training, start_training
from tests.settings_calls import call
from tests.train.quick_runs import quick_home, quick_settings


@pytest.mark.slow
def test_a_resume_that_the_engine_refuses_removes_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    run = tmp_path / "run"
    start_training(run, prepare_training(quick_settings(llama, home, 2)))
    (run / "notes.txt").write_text("mine")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError("not this engine")

    monkeypatch.setattr("mismatch_probe.train.parts.start_engine", refuse)
    with pytest.raises(UsageError, match="not this engine"):
        call(train, {"task": {"reward": "lengths_as_rewards:even"}}, out=run, resume=True)
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_run_that_kept_the_text_of_a_flag_goes_on_with_the_value_of_a_file(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    run = tmp_path / "run"

    def prepared(value: Any) -> TrainingPreparation:
        return prepare_training(quick_settings(llama, home, 2, engine={"args": {"block_size": value}}))

    directory = start_training(run, prepared(32))
    directory.write_training_manifest(directory.read_training_manifest().model_copy(update={"run_key": ""}))
    edited = directory.manifest_path.read_text().replace('"block_size": 32', '"block_size": "32"')
    directory.manifest_path.write_text(edited)
    assert directory.read_training_manifest().settings.engine.args == {"block_size": "32"}
    resume_training(run, prepared("32"))
    with pytest.raises(RunDirectoryError, match=r"settings \(engine\.args\.block_size\)"):
        resume_training(run, prepared(64))


def test_a_run_whose_temperature_was_edited_does_not_go_on(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = prepare_training(quick_settings(llama, quick_home(tmp_path, monkeypatch), 2))
    directory = start_training(tmp_path / "run", preparation)
    edited = re.sub(r'"temperature": [\d.]+', '"temperature": 0.5', directory.manifest_path.read_text())
    resume_training(directory.path, preparation)
    directory.manifest_path.write_text(edited)
    with pytest.raises(BrokenRecord, match=r"manifest\.json was edited"):
        call(train, {}, out=directory.path, resume=True)
