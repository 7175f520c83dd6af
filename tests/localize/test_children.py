"""A job's failure comes back as the error that it was."""

import sys
from pathlib import Path

import pytest

from mismatch_probe.errors import EngineError, OutOfMemory
from mismatch_probe.localize.children import run_job
from mismatch_probe.localize.workspace import JobNotes, Workspace


def child_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> Workspace:
    """Let the child interpreter run `code` instead of the worker module."""
    script, body = tmp_path / "python", tmp_path / "child.py"
    body.write_text(code)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {body} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return Workspace(tmp_path)


def test_an_error_of_a_job_keeps_its_kind_and_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine failed unexpectedly: FileNotFoundError"):
        run_job(Workspace(tmp_path), "engine")


def test_a_job_that_the_system_killed_is_out_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workspace = child_that(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(OutOfMemory, match="want of memory"):
        run_job(workspace, "training")


def test_a_job_that_dies_without_a_word_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace = child_that(monkeypatch, tmp_path, "import sys; print('last words', file=sys.stderr); sys.exit(7)")
    with pytest.raises(EngineError, match="training job ended with 7: last words"):
        run_job(workspace, "training")


def test_notes_of_a_job_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workspace = child_that(monkeypatch, tmp_path, "print('chatter on stdout')")
    workspace.write_notes("training", JobNotes(seconds={"walk reference": 1.5}))
    assert run_job(workspace, "training").seconds == {"walk reference": 1.5}
