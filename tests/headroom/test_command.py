import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.report.answers.headroom import headroom_answer
from mismatch_probe.report.screen import print_answer
from tests.gate.cli import CommandLine
from tests.headroom.planted import examined, planted
from tests.tiny_models import make_checkpoint

SMALL = ("--prompts", "sums:easy", "--num-prompts", 2, "--samples-per-prompt", 2, "--max-new-tokens", 8)


@pytest.mark.slow
def test_one_document_on_stdout_and_the_same_in_the_folder(tmp_path: Path, command_line: CommandLine) -> None:
    folder = make_checkpoint(tmp_path / "m")
    ended = command_line("headroom", "--model", folder, *SMALL, "--out", tmp_path / "out", "--json")
    assert ended.code == 0
    document = Headroom.model_validate(ended.document)
    assert document.schema_version == 1
    assert json.loads((tmp_path / "out" / "headroom.json").read_text()) == ended.document
    assert document.verdict.sentence in ended.stderr
    assert document.sampled_by is not None
    assert document.sampled_by in ended.stderr


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_ends_with_1(tmp_path: Path, command_line: CommandLine) -> None:
    changes = {"gate_proj": 2.0**8, "up_proj": 2.0**8, "mlp.down_proj": 2.0**-14, "embed_tokens": 2.0**17}
    ended = command_line("headroom", "--model", planted(tmp_path / "m", changes=changes), *SMALL)
    assert ended.code == 1
    assert "Activations overflow FP16, first at model.embed_tokens" in ended.stdout


@pytest.mark.slow
def test_responses_that_leave_no_gradient_are_no_yes(tmp_path: Path, command_line: CommandLine) -> None:
    """The demo is certain of this sum: FP16's gradient of it is zero, and BF16's error thousands of times its size."""
    sampling = ("--prompts", "sums:easy", "--num-prompts", 1, "--samples-per-prompt", 2, "--max-new-tokens", 8)
    ended = command_line("headroom", "--model", "demo", *sampling, "--out", tmp_path / "out")
    assert ended.code == ExitCode.INCONCLUSIVE
    assert "Weights and activations fit FP16; gradients were not measured" in " ".join(ended.stdout.split())
    assert "--num-prompts" in ended.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "gradients not measured" in page
    assert "not measured</" in page


def test_weights_only_runs_nothing(tmp_path: Path, command_line: CommandLine) -> None:
    folder = make_checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    ended = command_line("headroom", "--model", folder, "--weights-only", "--json")
    assert ended.code == 0
    assert ended.document["activations"] is None
    assert ended.document["device"] is None
    assert "activations and gradients were not looked at" in ended.stderr


def test_settings_come_from_a_file_and_flags_override_it(tmp_path: Path, command_line: CommandLine) -> None:
    config = tmp_path / "headroom.toml"
    config.write_text(
        f'weights_only = true\n[model]\npath = "{make_checkpoint(tmp_path / "m")}"\n[sampling]\nseed = 1\n'
    )
    ended = command_line("headroom", "--config", config, "--seed", 7, "--json")
    assert ended.code == 0
    assert ended.document["settings"]["sampling"]["seed"] == 7
    assert ended.document["settings"]["weights_only"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "no model to examine; give --model"),
        (("--model", "no/such/folder"), "does not exist"),
        (("--model", "demo", "--objective", "ppo"), "objective ppo needs a critic"),
        (("--model", "demo", "--objective", "grp"), "did you mean 'grpo'"),
        (("--model", "demo", "--samples-per-prompt", 1), "compares the responses to one prompt"),
        (("--model", "demo", "--prompts", "sums:none"), "has no split 'none'"),
        (("--model", "demo", "--device", "cuda:99"), "is not there"),
        (("--model", "demo", "--max-new-tokens", 4000), "exceeds the model's context"),
    ],
)
def test_bad_input_is_a_sentence(words: tuple[object, ...], sentence: str, command_line: CommandLine) -> None:
    ended = command_line("headroom", *words)
    assert ended.code == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_that_holds_something_is_not_reused(tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ended = command_line("headroom", "--model", "demo", "--out", tmp_path)
    assert ended.code == 2
    assert "is not empty: give another --out" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 200])
def test_the_screen_says_what_the_document_says(tmp_path: Path, width: int) -> None:
    headroom = examined(planted(tmp_path / "m", changes={"layers.1.mlp.down_proj": 2.0**16}))
    console = Console(width=width, record=True, force_terminal=False, markup=False, file=StringIO())
    print_answer(headroom_answer(headroom), console)
    output = console.export_text()
    for line in (headroom.verdict.sentence, *headroom.verdict.evidence, *headroom.verdict.advice):
        assert line in output
    assert "model.layers.1" in output
    assert "2¹⁶" in output
