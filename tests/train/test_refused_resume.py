"""A run that goes on and is refused keeps its folder, with whatever else lies in it."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from mismatch_probe.cli.train_command import run_train
from mismatch_probe.errors import UsageError
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import start_training
from tests.train.quick_runs import quick_home, quick_settings


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
        run_train({"task": {"reward": "lengths_as_rewards:even"}}, config=None, out=run, resume=True, json_output=False)
    assert (run / "notes.txt").read_text() == "mine"
