"""Setting up: a disk that cannot hold the environment is named before anything is installed."""

import os
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"


def set_up(tmp_path: Path, free_gib: int) -> "subprocess.CompletedProcess[str]":
    """The script on a disk with this much space, with an interpreter that makes nothing and fails."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in {
        "df": f"printf 'head\\ndisk 0 0 {free_gib * 1024 * 1024} 0 /\\n'",
        "python3.11": 'case "$1" in -c) exit 0 ;; *) echo "venv was made" >&2; exit 7 ;; esac',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"PATH": path}
    return subprocess.run(
        ["bash", SETUP, str(tmp_path / "venv")], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("free_gib", [0, 4])
def test_a_full_disk_is_one_sentence_before_anything_is_installed(tmp_path: Path, free_gib: int) -> None:
    result = set_up(tmp_path, free_gib)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"needs about 5 GiB, and its disk has {free_gib * 1024} MiB free" in result.stderr
    assert "make VENV=FOLDER" in result.stderr


def test_a_disk_with_room_lets_the_environment_be_made(tmp_path: Path) -> None:
    result = set_up(tmp_path, 6)
    assert result.returncode == 7
    assert "venv was made" in result.stderr
