"""No flag that names an output file writes over, or removes, a file of any run."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mismatch_probe.cli import gate_answers
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.answers import GateResult
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import GATE, GOOD, CommandLine, gate_file
from tests.simulated_run import Simulation, simulated_run

SMALL = Simulation(num_prompts=32, mean_length=20)
MANIFESTS = {
    "comparison": '{"manifest_version": 1, "content_keys": {}}',
    "training": '{"training_version": 1, "content_keys": {}}',
    "sanity": '{"training_version": 1, "content_keys": {"sanity": "x"}}',
    "imported": '{"manifest_version": 1, "log": {"format": "plain"}}',
    "damaged": '{"manifest_version"',
}
FILES = ("manifest.json", "rollouts.parquet", "summary.json", "report.html", "junit.xml", "legs/train-bf16.parquet")


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", SMALL)


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def other_run(folder: Path, manifest: str) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    (folder / "manifest.json").write_text(manifest)
    return folder


def as_it_is(path: Path, folder: Path) -> Path:
    return path


def roundabout(path: Path, folder: Path) -> Path:
    return path.parent / ".." / path.parent.name / "." / path.name


def through_a_folder(path: Path, folder: Path) -> Path:
    link = folder / "elsewhere"
    link.symlink_to(path.parent)
    return link / path.name


def through_a_link(path: Path, folder: Path) -> Path:
    link = folder / "link.md"
    link.symlink_to(path)
    return link


SPELT = [as_it_is, roundabout, through_a_folder, through_a_link]


@pytest.mark.parametrize("flag", ["--markdown", "--junit"])
@pytest.mark.parametrize("spelt", SPELT)
@pytest.mark.parametrize("name", ["legs/train-bf16.parquet", "manifest.json", "rollouts.parquet", "report.html"])
def test_a_file_of_the_run_that_is_judged_is_no_output(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, flag: str, spelt: Callable[..., Path], name: str
) -> None:
    run.report_path.write_text("page")
    config, path, before = gate_file(tmp_path, GATE + GOOD), spelt(run.path / name, tmp_path), contents(run.path)
    ended = command_line("gate", run.path, "--config", config, flag, path)
    assert (ended.code, "never written over" in ended.stderr) == (ExitCode.USAGE, True), ended
    assert contents(run.path) == before


@pytest.mark.parametrize("variable", ["GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"])
def test_a_file_of_a_run_is_no_summary_of_a_job(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.setenv(name, str(run.path / "manifest.json" if name == variable else tmp_path / name))
    config, before = gate_file(tmp_path, GATE + GOOD), contents(run.path)
    ended = command_line("gate", run.path, "--config", config, "--github")
    assert (ended.code, variable in ended.stderr) == (ExitCode.USAGE, True), ended
    assert contents(run.path) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_file_of_another_run_of_any_kind_is_no_output(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, kind: str, name: str
) -> None:
    other = other_run(tmp_path / "other", MANIFESTS[kind])
    before, config = contents(tmp_path), gate_file(tmp_path, GATE + GOOD)
    before["mismatch.toml"] = config.read_bytes()
    for words in (
        ("gate", run.path, "--config", config, "--junit", other / name),
        ("gate", run.path, "--config", config, "--markdown", other / name),
        ("diff", run.path, run.path, "--html", other / name),
    ):
        ended = command_line(*words)
        assert (ended.code, "never written over" in ended.stderr) == (ExitCode.USAGE, True), ended
    ended = command_line("init", "gate", "--out", other / name)
    assert ended.code == ExitCode.USAGE
    assert contents(tmp_path) == before


def test_a_name_that_a_run_will_need_is_no_output(command_line: CommandLine, run: RunDirectory, tmp_path: Path) -> None:
    config = gate_file(tmp_path, GATE + GOOD)
    for name in ("legs/train-fp32.parquet", "summary.json", "report.html", "parts/x.md", "LEGS/TRAIN.parquet", ".lock"):
        before = contents(run.path)
        for words in (("gate", run.path, "--config", config, "--markdown"), ("init", "gate", "--out")):
            ended = command_line(*words, run.path / name)
            assert (ended.code, "never written over" in ended.stderr) == (ExitCode.USAGE, True), ended
        assert contents(run.path) == before


@pytest.mark.slow
def test_the_summary_of_a_run_is_not_the_page_of_a_difference(command_line: CommandLine, run: RunDirectory) -> None:
    assert command_line("report", run.path, "--recompute").code in (ExitCode.PASS, ExitCode.ENVIRONMENT)
    before = contents(run.path)
    for name in ("summary.json", "report.html", "legs/infer-bf16-decode.parquet"):
        ended = command_line("diff", run.path, run.path, "--html", run.path / name)
        assert (ended.code, "never written over" in ended.stderr) == (ExitCode.USAGE, True), ended
    assert contents(run.path) == before


def test_what_a_floor_is_written_to_is_no_file_of_a_run(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path
) -> None:
    again, before = simulated_run(tmp_path / "again", SMALL), contents(run.path)
    config = gate_file(tmp_path, '[gate]\nfloor = "run/summary.json"\n' + GOOD)
    ended = command_line("gate", "calibrate", run.path, again.path, "--config", config)
    assert (ended.code, "never written over" in ended.stderr) == (ExitCode.USAGE, True), ended
    assert contents(run.path) == before


def test_a_hard_link_to_a_leg_may_be_replaced_and_the_leg_stays(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path
) -> None:
    leg, link = run.leg_path("train-bf16"), tmp_path / "link.md"
    os.link(leg, link)
    before = leg.read_bytes()
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + GOOD), "--markdown", link)
    assert ended.code == ExitCode.PASS, ended
    assert leg.read_bytes() == before
    assert b"Pass" in link.read_bytes()


def test_files_beside_those_of_a_run_are_outputs(command_line: CommandLine, run: RunDirectory, tmp_path: Path) -> None:
    """As the GitHub action has it: the answer beside the run, and written again. A folder of no run is free."""
    config = gate_file(tmp_path, GATE + GOOD)
    (tmp_path / "manifest.json").write_text('{"name": "an app", "icons": []}')
    outputs = ("--markdown", run.path / "gate.md", "--junit", run.path / "junit.xml")
    for _ in range(2):
        assert command_line("gate", run.path, "--config", config, *outputs).code == ExitCode.PASS
    assert command_line("gate", run.path, "--config", config, "--markdown", tmp_path / "a" / "b.json").code == 0
    assert (tmp_path / "a" / "b.json").exists()


def test_nothing_is_removed_before_the_answer_is_whole(
    command_line: CommandLine, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no older answer stands meanwhile: the files say that there is none yet."""
    config, outputs = gate_file(tmp_path, GATE + GOOD), [tmp_path / "answer.md", tmp_path / "answer.xml"]
    words = ("gate", run.path, "--config", config, "--markdown", outputs[0], "--junit", outputs[1])
    assert command_line(*words).code == ExitCode.PASS
    outputs += [run.path / "gate.json", run.path / "junit.xml"]
    seen: list[str] = []

    def looked_at(*_: object, **__: object) -> None:
        seen.extend(path.read_text() for path in outputs)
        raise KeyboardInterrupt

    monkeypatch.setattr(gate_answers, "run_gate", looked_at)
    assert command_line(*words).code == ExitCode.INTERRUPTED
    assert len(seen) == len(outputs)
    assert all("ended before it had an answer" in text for text in seen)
    assert GateResult.model_validate_json(seen[2]).answer == "error"
    assert [path.read_text() for path in outputs] == seen


@pytest.mark.parametrize("kind", ["training", "sanity"])
def test_a_refused_gate_leaves_nothing_in_a_training_run(command_line: CommandLine, tmp_path: Path, kind: str) -> None:
    other = other_run(tmp_path / "other", MANIFESTS[kind])
    before = contents(other)
    ended = command_line("gate", other, "--config", gate_file(tmp_path, GATE + GOOD), "--junit", tmp_path / "out.xml")
    assert ended.code == ExitCode.USAGE
    assert contents(other) == before
    assert "<error" in (tmp_path / "out.xml").read_text()


def test_what_headroom_found_is_no_output(command_line: CommandLine, run: RunDirectory, tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.mkdir()
    (found / "headroom.json").write_text(json.dumps({}))
    ended = command_line("diff", run.path, run.path, "--html", found / "headroom.json")
    assert ended.code == ExitCode.USAGE
    assert (found / "headroom.json").read_text() == "{}"
