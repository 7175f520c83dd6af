"""A source with fewer prompts than the gate's looks take: said before anything is sampled, with what fixes it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mismatch_probe.cli.gate_answers import GatedCompare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.gate.run import run_gate
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import GOOD, CommandLine, gate_file

GATE = "[gate]\nmin_sequences = {first}\nmax_sequences = {last}\nmin_prompts = {prompts}\n"


def prompts_file(folder: Path, number: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {addend} + 1?"}) + "\n" for addend in range(number)))
    return path


def started(folder: Path, source: str, samples: int, **gate: int) -> tuple[int | None, str]:
    """Prompts that the run starts with, and what is said about them; nothing is sampled."""
    values: dict[str, Any] = {
        "model": {"path": "demo"},
        "prompts": {"source": source},
        "sampling": {"samples_per_prompt": samples},
    }
    config = gate_file(folder, GATE.format(**gate) + GOOD)
    output = io.StringIO()
    console = Console(file=output, width=1000)
    settings = GatedCompare.open(config, None, without_baseline=False).settings_to_start(
        parse_settings(CompareSettings, values), None, console
    )
    return settings.prompts.num_prompts, output.getvalue()


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ({"first": 32, "last": 64, "prompts": 8}, "give 24; start with --samples-per-prompt 2"),
        ({"first": 24, "last": 96, "prompts": 64}, "holds 24 prompts, and a pass of"),
    ],
)
def test_a_first_look_out_of_reach_is_refused_before_anything_starts(
    command_line: CommandLine, tmp_path: Path, gate: dict[str, int], words: str
) -> None:
    source, config = prompts_file(tmp_path, 24), gate_file(tmp_path, GATE.format(**gate) + GOOD)
    ended = command_line("compare", "--model", "demo", "--prompts", source, "--gate", config, "--out", tmp_path / "run")
    assert (ended.code, words in ended.stderr) == (ExitCode.USAGE, True), ended
    assert not (tmp_path / "run").exists()


def test_what_the_sentence_advises_starts(tmp_path: Path) -> None:
    source = str(prompts_file(tmp_path, 24))
    with pytest.raises(UsageError, match="--samples-per-prompt 2"):
        started(tmp_path, source, 1, first=32, last=32, prompts=8)
    assert started(tmp_path, source, 2, first=32, last=32, prompts=8)[0] == 16


def test_a_last_look_out_of_reach_is_said_beforehand(tmp_path: Path) -> None:
    source = str(prompts_file(tmp_path, 24))
    number, output = started(tmp_path, source, 1, first=16, last=64, prompts=8)
    assert number == 16
    assert "The last look cannot be reached" in output
    assert "--samples-per-prompt 3" in output


@pytest.mark.parametrize("source", ["sums:easy", "file"])
def test_prompts_that_are_enough_need_no_word(tmp_path: Path, source: str) -> None:
    source = str(prompts_file(tmp_path, 64)) if source == "file" else source
    assert "cannot be reached" not in started(tmp_path, source, 1, first=16, last=64, prompts=8)[1]


def test_the_next_look_says_what_it_takes(command_line: CommandLine, small: RunDirectory, tmp_path: Path) -> None:
    config = gate_file(tmp_path, GATE.format(first=64, last=128, prompts=8) + GOOD)
    ended = command_line("gate", small.path, "--config", config)
    assert ended.code == ExitCode.INCONCLUSIVE
    assert (
        "the first look is at 64 sequences, which takes 64 prompts of sums:long.\n    mismatch-probe compare"
        in ended.stdout
    )


def test_a_next_look_that_the_source_cannot_give_has_no_command(small: RunDirectory, tmp_path: Path) -> None:
    """Or the command that is printed would end in the same answer for ever."""
    config = gate_file(tmp_path, GATE.format(first=64, last=128, prompts=8) + GOOD)
    result = run_gate(small.path, config, count_prompts=lambda source, most: min(most, 24))
    assert (result.answer, result.next_command) == ("inconclusive", None)
    assert result.sentence.endswith(
        "takes 64 prompts of sums:long, and that holds 24: compare anew with --prompts a source of more."
    )
    assert run_gate(small.path, config, count_prompts=lambda source, most: most).next_command is not None


def test_a_preset_says_how_many_prompts_the_source_has_too(small: RunDirectory) -> None:
    result = run_gate(small.path, "nemo-rl", count_prompts=lambda source, most: min(most, 24))
    assert result.next_command is None
    assert ", and that holds 24: compare anew with --prompts a source of more" in result.sentence
    result = run_gate(small.path, "nemo-rl", count_prompts=lambda source, most: most)
    assert "and that holds" not in result.sentence


def test_prompts_that_cannot_be_counted_here_leave_the_command(small: RunDirectory, tmp_path: Path) -> None:
    def count(source: str, most: int) -> int:
        raise UsageError(f"{source} is on another machine")

    config = gate_file(tmp_path, GATE.format(first=64, last=128, prompts=8) + GOOD)
    assert run_gate(small.path, config, count_prompts=count).next_command is not None
