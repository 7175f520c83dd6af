"""How many problems a command takes of its task, and by which flags it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import EvaluationSettings, SanitySettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.evaluate.run import DEFAULTS, prepare_evaluation
from mismatch_probe.reading import merge_tables
from mismatch_probe.train.preparation import TrainingPreparation, prepare_training
from mismatch_probe.train.sanity import prepare_sanity

pytestmark = pytest.mark.slow


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "always.py").write_text("def right(prompt, response, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "always:right"


def rows(folder: Path, number: int) -> str:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{row}+{row}="}) for row in range(number)))
    return str(path)


def settings(source: str, **task: Any) -> TrainSettings:
    return parse_settings(TrainSettings, {"model": {"path": "demo"}, "task": {"source": source, **task}})


def evaluated(source: str, reward: str) -> int:
    given = {"model": {"path": "demo"}, "pairs": [["fp32", "fp32"]], "prompts": {"source": source}}
    comparison = parse_settings(CompareSettings, merge_tables(DEFAULTS, given))
    prepared = prepare_evaluation(comparison, EvaluationSettings(reward=reward))
    return len(prepared.comparison.prompts)


def trained(preparation: TrainingPreparation) -> int:
    assert preparation.settings.task.num_problems == preparation.manifest.settings.task.num_problems
    return len(preparation.problems)


@pytest.mark.parametrize("number", [40, 300])
def test_every_problem_of_a_file_is_trained_on(number: int, tmp_path: Path, reward: str) -> None:
    assert trained(prepare_training(settings(rows(tmp_path, number), reward=reward))) == number


def test_of_a_task_that_makes_them_256_are_trained_on() -> None:
    assert trained(prepare_training(settings("sums:easy"))) == 256


def test_as_many_as_asked_for_are_trained_on(tmp_path: Path, reward: str) -> None:
    source = rows(tmp_path, 40)
    assert trained(prepare_training(settings(source, reward=reward, num_problems=8))) == 8
    with pytest.raises(UsageError, match="fewer than the 41 asked for; give --num-problems 40, or leave it out"):
        prepare_training(settings(source, reward=reward, num_problems=41))


@pytest.mark.parametrize(("number", "tried"), [(40, 40), (300, 256)])
def test_sanity_tries_its_candidates_or_all_of_a_smaller_file(
    number: int, tried: int, tmp_path: Path, reward: str
) -> None:
    prepared = prepare_sanity(settings(rows(tmp_path, number), reward=reward), SanitySettings())
    assert trained(prepared) == tried
    assert prepared.settings.task.num_problems == 256


@pytest.mark.parametrize(("number", "taken"), [(40, 40), (300, 256)])
def test_evaluate_takes_256_or_all_of_a_smaller_file(number: int, taken: int, tmp_path: Path, reward: str) -> None:
    assert evaluated(rows(tmp_path, number), reward) == taken


@pytest.mark.parametrize("source", ["nosuch.jsonl", "sums:nosuch", "problems.txt", "hub:"])
def test_a_task_that_cannot_be_used_is_told_with_the_flag_that_named_it(source: str, reward: str) -> None:
    for prepare in (lambda: prepare_training(settings(source)), lambda: evaluated(source, reward)):
        with pytest.raises(UsageError, match="give --task"):
            prepare()


def test_other_answers_to_the_same_prompts_are_other_problems(tmp_path: Path, reward: str) -> None:
    path = tmp_path / "problems.jsonl"
    keys = set()
    for answer in ("2", "3"):
        path.write_text(json.dumps({"prompt": "1+1=", "answer": answer}))
        prepared = prepare_training(settings(str(path), reward=reward))
        keys.add(prepared.manifest.content_keys["problems"])
    assert len(keys) == 2
