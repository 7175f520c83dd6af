"""Each bad input ends with one sentence and a documented exit code, before any engine starts."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import Answer, probe
from tests.gate.cli import CommandLine
from tests.simulated_run import Simulation, edit_leg, simulated_run
from tests.tiny_models import make_checkpoint


def assert_refused(answer: Answer, words: str, code: ExitCode = ExitCode.USAGE) -> None:
    assert answer.returncode == code, answer
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


@pytest.mark.slow
def test_a_config_with_a_value_of_another_type(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama", num_attention_heads=2)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 2', '"num_attention_heads": "two"'))
    answer = probe("compare", "--model", checkpoint, "--out", tmp_path / "run")
    assert_refused(answer, f"the config of {checkpoint} cannot be used (Validation error for field")
    assert "expected int, got str" in answer.stderr


@pytest.mark.parametrize("dtype", ["int8", "auto", "float12"])
def test_an_unknown_dtype(tmp_path: Path, dtype: str) -> None:
    answer = probe("compare", "--model", "demo", "--dtype", dtype, "--out", tmp_path / "run")
    assert_refused(answer, f"dtype '{dtype}' cannot be used")
    assert answer.stderr.count(dtype) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"question": "a"}\n', "question"),
        ('\n{"prompt": ""}\n', "(line 2 of {path}) has no tokens"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, checkpoint: Path, content: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    answer = probe(
        "compare", "--model", checkpoint, "--prompts", path, "--num-prompts", 2 if words == "line 2" else 1,
        "--chat-template", "never", "--out", tmp_path / "run",
    )  # fmt: skip
    assert_refused(answer, words.format(path=path))


@pytest.mark.slow
def test_a_prompt_longer_than_the_context(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "' + "a" * 3000 + '"}\n')
    answer = probe(
        "compare", "--model", checkpoint, "--prompts", path, "--num-prompts", 1, "--out", tmp_path / "run",
        "--chat-template", "never",
    )  # fmt: skip
    assert_refused(answer, "exceeds the model's context")


@pytest.mark.slow
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


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    answer = probe("compare", "--model", "demo", "--out", tmp_path / ("x" * 300))
    assert_refused(answer, "the path is too long", ExitCode.ENVIRONMENT)


def test_resume_without_a_directory() -> None:
    assert_refused(probe("compare", "--model", "demo", "--resume"), "--resume needs --out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-such-flag", "1"], "there is no option --no-such-flag"),
        (["--dtype", "bf16", "--train-dtype", "fp16"], "--dtype sets both sides"),
        (["--train-dtype", "fp16"], "go together"),
        (["--infer-dtype", "int8"], "dtype 'int8' cannot be used"),
        (["--train-dtype", "int8", "--dtype", "bf16"], "dtype 'int8' cannot be used"),
        (["--temperature", "0"], "sampling.temperature"),
        (["--num-prompts", "0"], "prompts.num_prompts"),
        (["--prompts", "sums:nowhere"], "nowhere"),
        (["--config", "none.toml"], "none.toml"),
        (["--train-precision", "magic"], "training.precision"),
        (["--dtype", "fp64"], "vLLM cannot run in fp64"),
        (["--attention", "flash_attention_2", "--device", "cpu"], "flash_attention_2 needs a GPU"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--vllm.nonsense", "1"], "vLLM has no argument 'nonsense'"),
        (["--vllm.max_num_seqs", "many"], "--vllm.max_num_seqs takes a whole number"),
        (["--vllm.max_num_seqs", "4", "--vllm.max-num-seqs=8"], "--vllm.max_num_seqs is given twice"),
        (["--vllm.max_model_len", "none"], "--vllm.max_model_len takes a whole number"),
        (["--vllm.max_model_len", "8", "--prompts", "sums:easy"], "--vllm.max_model_len 8 leaves prompt"),
        (["--temperature", "0.001"], "--temperature 0.001 cannot be used"),
        (["--seed", "4294967296"], "sampling.seed"),
    ],
)
def test_flags_that_cannot_be_used(tmp_path: Path, words: list[str], sentence: str) -> None:
    assert_refused(probe("compare", "--model", "demo", "--out", tmp_path / "run", *words), sentence)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [[], ["--recompute"]])
def test_report_of_what_is_no_run(tmp_path: Path, flags: list[str]) -> None:
    assert_refused(probe("report", tmp_path / "none", *flags), "not a run directory")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def impossible_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A sound run whose summary cannot be read, for a reason that nothing foresees."""

    def read(_: RunDirectory) -> None:
        raise RuntimeError("nobody knows why")

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2))
    monkeypatch.setattr(RunDirectory, "read_summary", read)
    return run


def test_an_error_that_nobody_foresaw_is_a_sentence_too_and_no_failed_gate(
    impossible_run: RunDirectory, command_line: CommandLine
) -> None:
    ended = command_line("report", impossible_run.path, "--json")
    assert ended.code == ExitCode.ENVIRONMENT
    assert "nobody knows why" in ended.stderr
    assert "--debug shows where" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_debug_shows_the_traceback(impossible_run: RunDirectory, command_line: CommandLine) -> None:
    ended = command_line("report", impossible_run.path, "--debug")
    assert ended.code == ExitCode.ENVIRONMENT
    assert "Traceback" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--recompute"], ["--json"]])
def test_a_report_of_broken_data_ends_as_compare_does(tmp_path: Path, flags: list[str]) -> None:
    def lose_a_token(columns: dict[str, Any]) -> None:
        columns["logprobs"][0][0] = float("nan")

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2))
    edit_leg(run, "train-bf16", lose_a_token)
    run.write_summary(summarise(run, run.read_manifest()))
    answer = probe("report", run.path, *flags)
    assert answer.returncode == ExitCode.ENVIRONMENT
    assert "1 log-prob is missing" in (answer.stderr if "--json" in flags else answer.stdout)
    assert run.report_path.exists()


@pytest.mark.slow
def test_brackets_in_a_path_are_no_markup(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "[red]" / "run[/b]", Simulation(num_prompts=2), with_summary=True)
    answer = probe("report", run.path)
    assert answer.returncode == ExitCode.PASS
    assert f"Report: {run.report_path}" in answer.stdout
