"""Run directories of strangers: what they planted is neither followed nor opened, and nothing outside is touched."""

import os
import shutil
from pathlib import Path

import pytest

from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import CommandLine, check, gate_file
from tests.simulated_run import Simulation, simulated_run

pytestmark = pytest.mark.timeout(60)
SMALL = Simulation(num_prompts=32, mean_length=20)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", SMALL, with_summary=True)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder outside the run, with a file in it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("precious")
    return tmp_path / "outside"


def is_whole(victim: Path) -> bool:
    return [path.name for path in victim.iterdir()] == ["victim"] and (victim / "victim").read_text() == "precious"


def limit(folder: Path) -> Path:
    return gate_file(folder, "[gate]\nmin_sequences = 32\n" + check(metric="abs_logprob_diff", max=100))


@pytest.mark.parametrize(
    "name", [f"{prefix}{name}" for name in ("report.html", "gate.json", "junit.xml") for prefix in ("", ".writing-")]
)
@pytest.mark.parametrize("command", ["report", "gate"])
def test_a_link_where_a_page_or_an_answer_goes_is_refused(
    run: RunDirectory, victim: Path, tmp_path: Path, command_line: CommandLine, command: str, name: str
) -> None:
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(victim / "victim")
    words = ("--config", limit(tmp_path)) if command == "gate" else ()
    ended = command_line(command, run.path, *words)
    assert (ended.code, "is a symbolic link" in ended.stderr) == (4, True), ended
    assert is_whole(victim)


@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "gate.json", "headroom.json", "rollouts.parquet"])
@pytest.mark.parametrize("command", ["report", "gate", "diff"])
def test_a_pipe_keeps_no_command_waiting(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine, command: str, name: str
) -> None:
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    words = {"report": (), "gate": ("--config", limit(tmp_path)), "diff": (run.path,)}[command]
    ended = command_line(command, run.path, *words)
    assert (ended.code, "is a pipe" in ended.stderr) == (4, True), ended


@pytest.mark.parametrize("name", ["legs", "parts", "logs", "extension"])
def test_a_folder_that_leads_elsewhere_is_refused_before_anything_is_written_or_removed(
    run: RunDirectory, victim: Path, tmp_path: Path, command_line: CommandLine, name: str
) -> None:
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).symlink_to(victim)
    for words in (
        ("report", run.path),
        ("report", run.path, "--recompute"),
        ("gate", run.path, "--config", limit(tmp_path)),
        ("diff", run.path, run.path),
        ("compare", "--resume", "--out", run.path),
        ("evaluate", "--resume", "--out", run.path),
        ("localize", "--run", run.path),
        ("headroom", "--run", run.path),
    ):
        ended = command_line(*words)
        assert (ended.code, f"{name} is a symbolic link" in ended.stderr) == (4, True), (words, ended.stderr)
    assert is_whole(victim)


def test_a_training_run_whose_checkpoints_lie_elsewhere_is_refused(
    victim: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    from tests.report.training.training_runs import training_run

    directory = training_run(tmp_path / "trained")
    directory.checkpoints_path.symlink_to(victim)
    for words in (
        ("report", directory.path),
        ("train", "--resume", "--out", directory.path),
        ("train", "--canary", "--resume", "--out", directory.path),
        ("sanity", "--resume", "--out", directory.path),
    ):
        ended = command_line(*words)
        assert (ended.code, "checkpoints is a symbolic link" in ended.stderr) == (4, True), (words, ended.stderr)
    assert is_whole(victim)
