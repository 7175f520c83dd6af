"""Runs that were made before sides had names: report, gate and diff say of them what they said then.

`runs_made_before` holds three, with what was said of them at the time.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.difference.runs import difference_of
from mismatch_probe.gate.run import run_gate
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import write_report

THEN = Path(__file__).parent / "runs_made_before"
RUNS = ("dtypes", "crossed", "plain")
WORDS = ("headline", "sentence", "evidence")


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(THEN / request.param, tmp_path / request.param))


def same(now: Any, then: Any) -> bool:
    """Equal but for the last digits of numbers, which another processor may compute otherwise."""
    if isinstance(then, dict):
        return now.keys() >= then.keys() and all(same(now[name], then[name]) for name in then)
    if isinstance(then, list):
        return len(now) == len(then) and all(map(same, now, then))
    return bool(now == pytest.approx(then, rel=1e-6, abs=1e-12) if isinstance(then, float) else now == then)


def test_another_number_is_seen() -> None:
    assert same({"a": [1.0, "x"]}, {"a": [1.0 + 1e-9, "x"]})
    assert not same({"a": [1.0, "x"]}, {"a": [1.001, "x"]})
    assert not same({"a": [1.0, "x"]}, {"a": [1.0, "y"]})
    assert not same({}, {"a": 1})


def without_words(then: Any) -> Any:
    """How a verdict is put may change; its kind, its causes and every number stay."""
    if isinstance(then, dict):
        return {name: without_words(value) for name, value in then.items() if name not in WORDS}
    return [without_words(value) for value in then] if isinstance(then, list) else then


def message_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_numbers_and_the_verdicts_are_those_of_then(run: RunDirectory) -> None:
    summary = summarise(run, run.read_manifest()).model_dump(mode="json")
    then = message_of(run.path / "summary-then.json")
    assert same(summary, without_words(then))


@pytest.mark.slow
def test_the_page_can_be_drawn(run: RunDirectory) -> None:
    run.write_summary(summarise(run, run.read_manifest()))
    assert "BF16" in write_report(run).read_text(encoding="utf-8")


def test_a_gate_answers_as_it_did(run: RunDirectory) -> None:
    result = run_gate(run.path, THEN / "gate.toml")
    then = message_of(run.path / "gate-then.json")
    now = [check.model_dump(mode="json") for check in result.checks]
    assert same(now, then)


@pytest.mark.slow
def test_two_of_them_differ_as_they_did() -> None:
    now = difference_of(RunDirectory(THEN / "dtypes"), RunDirectory(THEN / "plain")).model_dump(mode="json")
    assert same(now["pairs"], without_words(message_of(THEN / "diff-then.json")))
