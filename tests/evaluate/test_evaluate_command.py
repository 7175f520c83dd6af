"""`evaluate` as its users run it: real vLLM, real transformers, the shipped checkpoint."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import Answer, probe

pytestmark = pytest.mark.slow

SMALL = (
    *("--model", "demo", "--task", "sums:easy", "--num-problems", "24", "--samples-per-prompt", "2"),
    *("--max-new-tokens", "40", "--dtype", "fp16", "--dtype", "bf16", "--vllm.enforce_eager", "true"),
)


def evaluate(*words: object, code: ExitCode = ExitCode.PASS) -> Answer:
    return probe("evaluate", *words, code=code)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate") / "run"
    evaluate(*SMALL, "--out", path)
    return path


def document(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation.json").read_text())  # type: ignore[no-any-return]


def test_every_engine_and_every_pair_has_its_accuracy_with_an_interval(run: Path) -> None:
    evaluation = document(run)
    assert [engine["infer_dtype"] for engine in evaluation["engines"]] == ["fp16", "bf16"]
    for engine in evaluation["engines"]:
        accuracy = engine["accuracy"]
        assert 0.4 < accuracy["low"] < accuracy["value"] < accuracy["high"] < 1
        assert accuracy["num_sequences"] == 48
    for pair in evaluation["pairs"]:
        assert pair["ess"]["value"] > 0.5
        assert pair["gap"]["value"] == pytest.approx(pair["under_pi"]["value"] - pair["under_mu"]["value"])
        assert abs(pair["gap"]["value"]) < 0.1
    fp16, bf16 = evaluation["pairs"]
    assert fp16["ess"]["value"] > bf16["ess"]["value"]


def test_pi_samples_in_a_run_that_is_taken_up_again(run: Path) -> None:
    before = document(run)
    answer = evaluate("--resume", "--out", run, "--sample-pi", "--json")
    after = json.loads(answer.stdout)
    assert after == document(run)
    assert after["engines"] == before["engines"]
    for pair in after["pairs"]:
        assert pair["direct"]["accuracy"]["num_sequences"] == 48
        gap = pair["direct"]["gap"]
        assert abs(gap["value"]) < gap["high"] - gap["low"]
    assert "Trained in BF16, deployed in BF16" in answer.stderr
    assert 'id="accuracy"' in (run / "report.html").read_text(encoding="utf-8")


def test_another_reward_marks_the_same_responses(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "marks.py").write_text("def none(prompt, response, answer):\n    return 0.0\n")
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    evaluate("--resume", "--out", run, "--reward", "marks:none")
    assert [engine["accuracy"]["value"] for engine in document(run)["engines"]] == [0, 0]
    assert document(run)["pairs"][0]["gap"]["low"] is None


def test_sides_are_evaluated_under_their_names(tmp_path: Path) -> None:
    few = ("--model", "demo", "--task", "sums:easy", "--num-problems", "8", "--max-new-tokens", "16")
    sides = ("--train", "bf16", "--infer", "bf16", "--infer", "cached:dtype=bf16,prefix_caching=true")
    evaluate(*few, *sides, "--vllm.enforce_eager", "true", "--out", tmp_path / "run")
    answer = document(tmp_path / "run")
    assert [(engine["infer"], engine["infer_dtype"]) for engine in answer["engines"]] == [
        ("bf16", "bf16"),
        ("cached", "bf16"),
    ]
    assert [(pair["train"], pair["infer"]) for pair in answer["pairs"]] == [("bf16", "bf16"), ("bf16", "cached")]
