"""What a GitHub job gets, what is shown where none runs, and a gate that has no baseline yet."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.publishing import render_markdown
from mismatch_probe.records.answers import GateResult
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import GATE, CommandLine, check, gate_file
from tests.simulated_run import Simulation, simulated_run

KEPT = check(metric="abs_logprob_diff", max=1)
BROKEN = check(metric="abs_logprob_diff", max=0.0001)
REGRESSION = check(metric="abs_logprob_diff", max_regression=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("github") / "run"
    return simulated_run(folder, Simulation(num_prompts=32, mean_length=20), with_summary=True)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files that a job's step writes to, in which others have written already."""
    files = {name: tmp_path / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for name, path in files.items():
        path.write_text("before\n")
        monkeypatch.setenv(name, str(path))
    return files


def test_a_job_gets_a_summary_outputs_and_annotations_without_a_token_of_the_model(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, job: dict[str, Path]
) -> None:
    warned = check(metric="kl_k2", max=1e-9, level="warn")
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + BROKEN + warned), "--github")
    assert ended.code == ExitCode.GATE_FAILED
    assert "::error title=gate%3A abs_logprob_diff max 0.0001 (bf16/bf16)::" in ended.stderr
    assert "::warning title=" in ended.stderr
    summary = job["GITHUB_STEP_SUMMARY"].read_text()
    assert summary.startswith("before\n")
    assert "mismatch-probe gate: fail" in summary
    assert job["GITHUB_OUTPUT"].read_text() == "before\nanswer=fail\nexit-code=1\n"
    assert "script" not in summary + ended.stderr
    assert "Not in a GitHub job" not in ended.stdout


def test_elsewhere_what_a_job_would_get_is_shown(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + BROKEN), "--github")
    assert ended.code == ExitCode.GATE_FAILED
    summary, _, rest = ended.stdout.partition("GITHUB_STEP_SUMMARY:\n")[2].partition("GITHUB_OUTPUT:\n")
    outputs, _, annotations = rest.partition("Annotations:\n")
    assert summary.startswith("### ❌ mismatch-probe gate: fail")
    assert outputs.split() == ["answer=fail", "exit-code=1"]
    assert annotations.startswith("::error title=gate%3A abs_logprob_diff max 0.0001")


def test_a_document_keeps_standard_output_for_itself(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    config = gate_file(tmp_path, GATE + KEPT)
    ended = command_line("gate", run.path, "--config", config, "--github", "--json")
    assert ended.document["answer"] == "pass"
    assert "Not in a GitHub job" in ended.stderr


def test_without_a_baseline_the_other_checks_are_judged_and_every_output_says_what_was_not(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, job: dict[str, Path]
) -> None:
    config = gate_file(tmp_path, GATE + KEPT + REGRESSION)
    ended = command_line("gate", run.path, "--config", config, "--github", "--without-baseline")
    assert ended.code == ExitCode.PASS
    result = GateResult.model_validate_json((run.path / "gate.json").read_text())
    assert result.left_out == ["abs_logprob_diff worse by <= 0.1"]
    assert [judged.kind for judged in result.checks] == ["max"]
    for text in (ended.stdout, job["GITHUB_STEP_SUMMARY"].read_text().replace("\\", "")):
        assert "no baseline yet, so abs_logprob_diff worse by <= 0.1 was not judged: make one" in text
        assert "--out baseline" in text
    assert "::warning title=gate%3A no baseline::not judged: abs_logprob_diff worse by <= 0.1" in ended.stderr
    suite = ElementTree.parse(run.path / "junit.xml").getroot()
    assert [case.find("skipped") is not None for case in suite.iter("testcase")] == [False, True]


def test_a_first_baseline_is_no_edit_of_the_gate_file(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path
) -> None:
    config = gate_file(tmp_path, GATE + KEPT + REGRESSION)
    command_line("gate", run.path, "--config", config, "--without-baseline")
    ended = command_line("gate", run.path, "--config", config, "--baseline", run.path)
    assert "was edited" not in ended.stdout


@pytest.mark.parametrize(
    ("checks", "words", "sentence"),
    [
        (REGRESSION, ["--without-baseline"], "compares with a baseline, so without one nothing is left"),
        (KEPT + REGRESSION, [], "or --without-baseline until there is one"),
        (KEPT, ["--without-baseline", "--baseline", "RUN"], "give one of them"),
    ],
)
def test_a_gate_that_would_pass_on_nothing_is_refused(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, checks: str, words: list[str], sentence: str
) -> None:
    given = [str(run.path) if word == "RUN" else word for word in words]
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + checks), *given)
    assert (ended.code, sentence in ended.stderr) == (ExitCode.USAGE, True), ended


@pytest.mark.parametrize(("fingerprint", "words"), [(None, "not known"), ("abc123", "abc123")])
def test_the_summary_names_the_fingerprint_of_the_model_or_says_that_it_is_not_known(
    fingerprint: str | None, words: str
) -> None:
    result = GateResult(
        tool_version="1", answer="pass", exit_code=0, sentence="Pass.", run="run", gate_file="gate.toml", model="demo"
    )
    summary = render_markdown(result.model_copy(update={"model_fingerprint": fingerprint}))
    assert f"- model demo, fingerprint {words}\n" in summary
    assert "fingerprint" not in render_markdown(result.model_copy(update={"model": None}))
