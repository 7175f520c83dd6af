"""`init` writes files that work, over nothing; every command's help ends with an example that can be given."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mismatch_probe.cli.commands import app
from mismatch_probe.cli.first_steps import STARTERS, starter_path
from mismatch_probe.cli.options import EXAMPLES
from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.config import load_gate
from tests.command_line import probe


@pytest.mark.parametrize("kind", STARTERS)
def test_a_file_to_begin_with_is_written_and_what_reads_it_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = probe("init", kind, code=ExitCode.PASS).stdout
    path = Path(STARTERS[kind].file)
    assert path.read_text() == starter_path(kind).read_text()
    assert output.startswith(f"Wrote {path}. Read it, then: mismatch-probe ")
    assert output.strip().endswith(f" {path}")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    assert "writes nothing over" in probe("init", "gate", "--out", path, code=ExitCode.USAGE).stderr
    assert path.read_text() == "mine"


def test_all_are_listed_and_a_misspelt_one_is_guessed() -> None:
    assert probe("init", code=ExitCode.PASS).stdout.count("mismatch.toml") == 1
    assert "did you mean 'guards'" in probe("init", "gaurds", code=ExitCode.USAGE).stderr


def test_a_file_is_not_written_where_nothing_says_which(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    output = probe("init", "--out", path, code=ExitCode.USAGE).stderr
    assert "give one of gate, guards" in output
    assert not path.exists()


def test_a_gate_without_its_file_says_how_to_write_one(tmp_path: Path) -> None:
    missing = tmp_path / "mismatch.toml"
    output = probe("gate", tmp_path, "--config", missing, code=ExitCode.USAGE).stderr
    assert "`mismatch-probe init gate` writes one" in output
    lines = re.search(r"(\[gate\]) and (preset = .*)", output)
    assert lines is not None
    missing.write_text("\n".join(lines.groups()))
    assert [check.metric for check in load_gate(missing).checks] == ["token_mult_prob_error", "kl_k3"]


def test_every_command_has_an_example_of_its_own() -> None:
    """That it works is tested with the command lines of the documents."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    assert commands.keys() | {"gate calibrate"} == EXAMPLES.keys()
    assert all(words.startswith(f"{command} ") for command, words in EXAMPLES.items())


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_of_a_command_ends_with_its_example(command: str) -> None:
    output = " ".join(probe(*command.split(), "--help", code=ExitCode.PASS).stdout.split())
    assert output.endswith(f"Example: mismatch-probe {EXAMPLES[command]}")


@pytest.mark.parametrize("command", EXAMPLES)
def test_a_switch_is_shown_as_one_that_takes_no_value(command: str) -> None:
    output = probe(*command.split(), "--help", code=ExitCode.PASS).stdout
    assert "--help" in output
    assert "<bool>" not in output


def test_a_paragraph_of_the_help_is_filled_whatever_lines_it_has_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = probe("watch", "--help", code=ExitCode.PASS).stdout
    assert "with 3 after --unjudged steps in a row" in output
