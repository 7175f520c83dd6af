"""What `sanity` and `evaluate` refuse before anything is sampled: one sentence, an exit code, nothing written."""

from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from tests.gate.cli import CommandLine

SANITY = ("sanity", "--model", "demo")
EVALUATE = ("evaluate", "--model", "demo")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("sanity",), "give --model"),
        (("evaluate",), "give --model"),
        ((*SANITY, "--keep-low", "0.9"), "--keep-low 0.9 lies above --keep-high 0.8"),
        ((*SANITY, "--keep-high", "1.5"), "setting 'keep_high' is not usable"),
        ((*SANITY, "--solve-samples", "0"), "setting 'solve_samples' is not usable"),
        ((*SANITY, "--candidates", "8"), "--candidates 8 is fewer than the 32 problems of a step"),
        ((*SANITY, "--num-problems", "8"), "--num-problems 8 is fewer than the 32 problems of a step"),
        ((*SANITY, "--objective", "grop"), "grop"),
        ((*SANITY, "--reward", "none"), "reward 'none' is unknown"),
        ((*SANITY, "--resume"), "--resume needs --out"),
        ((*SANITY, "--train-dtype", "fp64"), "fp64 is only a reference"),
        ((*SANITY, "--sample-pi"), "there is no option --sample-pi"),
        ((*EVALUATE, "--reward", "nowhere:none"), "nowhere"),
        ((*EVALUATE, "--task", "sums:none"), "has no split 'none'"),
        ((*EVALUATE, "--dtype", "fp16", "--train-dtype", "fp16"), "--dtype sets both sides"),
        ((*EVALUATE, "--train-dtype", "fp16"), "--train-dtype and --infer-dtype go together"),
        ((*EVALUATE, "--resume"), "--resume needs --out"),
        ((*EVALUATE, "--gate", "x"), "there is no option --gate"),
    ],
)
def test_it_is_one_sentence(command_line: CommandLine, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    out = () if "--resume" in words else ("--out", tmp_path / "run")
    ended = command_line(*words, *out)
    assert ended.code == ExitCode.USAGE
    assert sentence in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "run").exists()


def test_prompts_without_a_check_of_their_own_need_a_reward(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    ended = command_line(*EVALUATE, "--task", tmp_path / "prompts.jsonl", "--num-problems", 1)
    assert ended.code == ExitCode.USAGE
    assert "give --reward math" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sanity", "evaluate"])
def test_a_folder_that_is_taken_is_not_written_into(command_line: CommandLine, tmp_path: Path, command: str) -> None:
    (tmp_path / "note.txt").write_text("mine")
    ended = command_line(command, "--model", "demo", "--out", tmp_path)
    assert ended.code == ExitCode.USAGE
    assert "exists and is not empty" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
