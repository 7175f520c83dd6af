"""Each bad input ends with one sentence and a documented exit code, before any engine starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from tests.tiny_models import make_checkpoint


def probe(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mismatch_probe", *map(str, words)], capture_output=True, text=True, check=False, cwd=cwd
    )


def assert_refused(answer: subprocess.CompletedProcess[str], words: str, code: ExitCode = ExitCode.USAGE) -> None:
    assert answer.returncode == code, answer.stderr
    assert words in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama")


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    assert_refused(probe("compare", "--model", tmp_path / "none", "--out", tmp_path / "run"), "does not exist")


def test_no_model_at_all(tmp_path: Path) -> None:
    assert_refused(probe("compare", "--out", tmp_path / "run"), "give --model")


def test_broken_safetensors(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(probe("compare", "--model", checkpoint, "--out", tmp_path / "run"), "not an intact safetensors file")


@pytest.mark.parametrize("dtype", ["fp8", "auto", "float12"])
def test_an_unknown_dtype(tmp_path: Path, dtype: str) -> None:
    answer = probe("compare", "--model", "demo", "--dtype", dtype, "--out", tmp_path / "run")
    assert_refused(answer, f"dtype '{dtype}' cannot be used")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"question": "a"}\n', "question"),
        ('{"prompt": ""}\n', "has no tokens"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, checkpoint: Path, content: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    answer = probe(
        "compare", "--model", checkpoint, "--prompts", path, "--num-prompts", 2 if "line" in words else 1,
        "--chat-template", "never", "--out", tmp_path / "run",
    )  # fmt: skip
    assert_refused(answer, words)


def test_a_prompt_longer_than_the_context(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "' + "a" * 3000 + '"}\n')
    answer = probe(
        "compare", "--model", checkpoint, "--prompts", path, "--num-prompts", 1, "--out", tmp_path / "run",
        "--chat-template", "never",
    )  # fmt: skip
    assert_refused(answer, "exceeds the model's context")


def test_a_chat_template_that_fails(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    answer = probe("compare", "--model", checkpoint, "--out", tmp_path / "run")
    assert_refused(answer, "roles must alternate")


def test_a_run_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert_refused(probe("compare", "--model", "demo", "--out", tmp_path / "run"), "give another --out")


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = probe("compare", "--model", "demo", "--out", tmp_path / "file" / "run")
    assert_refused(answer, "cannot write", ExitCode.ENVIRONMENT)


def test_resume_without_a_directory() -> None:
    assert_refused(probe("compare", "--model", "demo", "--resume"), "--resume needs --out")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-such-flag", "1"], "'--no-such-flag' is not an option"),
        (["--dtype", "bf16", "--train-dtype", "fp16"], "--dtype sets both sides"),
        (["--train-dtype", "fp16"], "go together"),
        (["--temperature", "0"], "sampling.temperature"),
        (["--num-prompts", "0"], "prompts.num_prompts"),
        (["--prompts", "sums:nowhere"], "nowhere"),
        (["--config", "none.toml"], "none.toml"),
        (["--train-precision", "magic"], "training.precision"),
    ],
)
def test_flags_that_cannot_be_used(tmp_path: Path, words: list[str], sentence: str) -> None:
    assert_refused(probe("compare", "--model", "demo", "--out", tmp_path / "run", *words), sentence)


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    assert_refused(probe("report", tmp_path), "the run is unfinished")
