"""`sanity` as its users run it: real vLLM, the shipped checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import Answer
from tests.warm_python import warm_python

pytestmark = pytest.mark.slow

SMALL = (
    *("--model", "demo", "--task", "sums:terms=2", "--objective", "pg-seq-is", "--max-new-tokens", "24"),
    *("--candidates", "12", "--solve-samples", "4", "--prompts-per-step", "2", "--samples-per-prompt", "4"),
    *("--num-problems", "2", "--checkpoint-every", "1", "--vllm.enforce_eager", "true"),
)
ALWAYS_SOLVED = ("--keep-low", "1", "--keep-high", "1", "--learning-rate", "1e-9")
SOLVED_AT_TIMES = (
    *("--task", "sums:terms=3", "--max-new-tokens", "40"),
    *("--keep-low", "0.25", "--keep-high", "0.75", "--learning-rate", "1e-9"),
)


def sanity(*words: object, code: ExitCode) -> Answer:
    return warm_python("mismatch_probe", "sanity", *words, code=code)


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "sanity.json").read_text())  # type: ignore[no-any-return]


def test_a_model_that_solves_what_was_kept_passes_and_says_so_again_when_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = sanity(*SMALL, *ALWAYS_SOLVED, "--steps", 8, "--out", run, "--json", code=ExitCode.PASS)
    document = json.loads(answer.stdout)
    assert document == record(run)
    assert document["passed"]
    assert document["accuracy"]["value"] > 0.95
    assert {document["rates"][key] for key in document["kept"]} == {1.0}
    assert (run / "checkpoints" / f"step-{document['step']:06d}" / "model" / "config.json").exists()
    again = sanity("--resume", "--out", run, "--json", code=ExitCode.PASS)
    assert json.loads(again.stdout) == document
    assert "step 1/" not in again.stderr


def test_a_model_that_does_not_learn_fails_and_goes_on_without_trying_the_problems_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = sanity(*SMALL, *SOLVED_AT_TIMES, "--steps", 1, "--out", run, code=ExitCode.GATE_FAILED)
    assert "candidates tried" in answer.stderr
    assert "Sanity test failed: 1 step was not enough." in answer.stdout
    assert f"Report: {run / 'report.html'}" in answer.stdout
    first = record(run)
    again = sanity("--resume", "--out", run, "--steps", 3, code=ExitCode.GATE_FAILED)
    assert "candidates tried" not in again.stderr
    assert "step 1/3" not in again.stderr
    later = record(run)
    assert (later["kept"], later["rates"]) == (first["kept"], first["rates"])
    assert later["step"] == 3
    trained_on = {line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert trained_on == {1, 2, 3}


def test_a_task_out_of_reach_is_refused_after_trying_it(tmp_path: Path) -> None:
    words = (*SMALL, "--task", "copy:terms=4", "--max-new-tokens", "8", "--steps", "1", "--out", tmp_path / "run")
    answer = sanity(*words, code=ExitCode.USAGE)
    assert "fewer than the 2 problems of a step; give more --candidates, an easier --task" in answer.stderr
