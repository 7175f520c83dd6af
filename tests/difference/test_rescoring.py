"""`diff --rescore`: one run's responses scored with the settings of another, by a real engine and training path."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import FEW, Answer, probe
from tests.gate.cli import CommandLine
from tests.simulated_run import Simulation, edit_manifest, simulated_run
from tests.tiny_models import make_checkpoint

SMALL = Simulation(num_prompts=8)
COMPARED = (
    *("--prompts", "sums:easy", "--num-prompts", "8", "--max-new-tokens", "48"),
    *("--vllm.enforce_eager", "true", "--dtype", "bf16", "--config", FEW),
)


@pytest.mark.parametrize(
    ("flags", "what_to_give"), [(["--rescore"], "add --out"), (["--out", "c"], "give --html for a page")]
)
def test_rescoring_and_its_place_go_together(
    flags: list[str], what_to_give: str, tmp_path: Path, command_line: CommandLine
) -> None:
    run = simulated_run(tmp_path / "a", SMALL)
    ended = command_line("diff", run.path, run.path, *flags)
    assert ended.code == ExitCode.USAGE
    assert what_to_give in ended.stderr


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (SMALL, replace(SMALL, sampling={"temperature": 0.7}), "sampled with temperature = 1.0"),
        (SMALL, SMALL, "no log-probs of its engine by prefill"),
        (
            replace(SMALL, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16))),
            replace(SMALL, pairs=((Dtype.FP32, Dtype.FP32),)),
            "has responses of bf16, fp16 and none of fp32",
        ),
    ],
    ids=["another temperature", "no prefill", "another dtype of two"],
)
def test_responses_that_cannot_be_rescored_are_refused_before_anything_starts(
    first: Simulation, second: Simulation, sentence: str, tmp_path: Path, command_line: CommandLine
) -> None:
    runs = simulated_run(tmp_path / "a", first).path, simulated_run(tmp_path / "b", second).path
    ended = command_line("diff", *runs, "--rescore", "--out", tmp_path / "c")
    assert ended.code == ExitCode.USAGE
    assert sentence in ended.stderr
    assert not (tmp_path / "c").exists()


def run_tool(*words: object, code: ExitCode = ExitCode.PASS) -> Answer:
    return probe(*words, code=code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a`, and `b` of other responses with RoPE's buffers rounded and attention computed otherwise on one side."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_checkpoint(folder / "llama", "llama")
    run_tool("compare", "--model", model, *COMPARED, "--out", folder / "a")
    changed = ("--seed", "1", "--train-precision", "to", "--attention", "eager")
    run_tool("compare", "--model", model, *COMPARED, *changed, "--out", folder / "b")
    return folder


@pytest.fixture(scope="module")
def difference(runs: Path) -> dict[str, Any]:
    answer = run_tool("diff", runs / "a", runs / "b", "--rescore", "--out", runs / "c", "--json")
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_rescored_responses_are_compared_on_the_same_tokens(runs: Path, difference: dict[str, Any]) -> None:
    assert difference["rescored_with"] == str(runs / "b")
    [pair] = difference["pairs"]
    assert (pair["comparison"], pair["same_responses"]) == ("paired", 8)
    assert pair["moved"]["mu"]["value"] == 0
    assert pair["moved"]["pi"]["value"] > 0
    settings = {change["name"] for change in difference["changes"] if change["kind"] == "settings"}
    assert settings == {"training.precision", "training.attention"}


@pytest.mark.slow
def test_a_rescored_run_is_a_run_that_sampled_nothing(runs: Path, difference: dict[str, Any]) -> None:
    run = RunDirectory(runs / "c")
    stage = run.read_manifest().stages["sample-bf16"]
    assert stage.state == "skipped"
    assert str(runs / "a") in stage.note
    assert stage.effective_settings["dtype"] == "bf16"
    assert not run.leg_path("infer-bf16-decode").exists()
    assert run.read_summary().pairs[0].legs["mu"] == "infer-bf16-prefill"
    assert run.report_path.exists()


@pytest.mark.slow
def test_the_same_command_again_computes_nothing_anew(runs: Path, difference: dict[str, Any]) -> None:
    legs = {path.name: path.stat().st_mtime_ns for path in (runs / "c" / "legs").iterdir()}
    again = run_tool("diff", runs / "a", runs / "b", "--rescore", "--out", runs / "c", "--json")
    assert json.loads(again.stdout)["pairs"] == difference["pairs"]
    assert legs == {path.name: path.stat().st_mtime_ns for path in (runs / "c" / "legs").iterdir()}


def _newer_vllm(manifest: Manifest) -> None:
    manifest.versions |= {name: "99.0" for name in manifest.versions if name.startswith("vllm")}


def _other_checkpoint(manifest: Manifest) -> None:
    model = manifest.settings.model.model_copy(update={"path": "demo"})
    manifest.settings = manifest.settings.model_copy(update={"model": model})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [(_newer_vllm, "which is not what is installed here"), (_other_checkpoint, "come out with other token ids")],
)
def test_settings_that_cannot_be_had_here_are_refused(change: Any, sentence: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "b", tmp_path / "b")
    edit_manifest(RunDirectory(tmp_path / "b"), change)
    command = ("diff", runs / "a", tmp_path / "b", "--rescore", "--out", tmp_path / "c")
    assert sentence in run_tool(*command, code=ExitCode.USAGE).stderr
    assert not (tmp_path / "c").exists()
