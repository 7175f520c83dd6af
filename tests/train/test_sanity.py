"""The set that is kept, and when the test is passed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import EngineSettings, SanitySettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord, Solved, TrainingDirectory
from mismatch_probe.train.preparation import TrainingPreparation, prepare_training
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.run import resume_training, start_training
from mismatch_probe.train.sanity import (
    SanityTest,
    accuracy_of,
    at_step,
    prepare_sanity,
    require_enough,
    solved_by_problem,
    within_rates,
)

SETTINGS = SanitySettings(candidates=8, solve_samples=5)


def rollout(problem: str, reward: float, length: int = 3) -> Rollout:
    sequence = TokenSequence(f"{problem}/0", [1], list(range(length)))
    return Rollout(sequence, np.zeros(length), problem, reward, truncated=False, text="")


def answers(right: dict[str, int], of: int = 4) -> list[Rollout]:
    """`of` responses to every problem, as many of them right as said."""
    return [rollout(problem, float(number < count)) for problem, count in right.items() for number in range(of)]


def settings(**changes: object) -> TrainSettings:
    values = {"model": {"path": "demo"}, "task": {"source": "sums:easy"}, "rollout": {"prompts": 2, **changes}}
    return parse_settings(TrainSettings, values)


def sanity_test(folder: Path, kept: Sequence[str] = ("a", "b", "c")) -> SanityTest:
    """A test at work, its problems chosen; what it is prepared from is not looked at."""
    folder.mkdir()
    record = SanityRecord(settings=SETTINGS, kept=list(kept))
    return SanityTest(SanityDirectory(folder), prepare_sanity(settings(), SETTINGS), record, lambda sentence: None)


@pytest.mark.slow
def test_engine_arguments_are_recorded_in_the_engines_own_types_as_a_resume_reads_them() -> None:
    given = settings().model_copy(update={"engine": EngineSettings(args={"enforce_eager": "true"})})
    prepared = prepare_sanity(given, SETTINGS)
    assert prepared.settings.engine.args == prepared.manifest.settings.engine.args == {"enforce_eager": True}


def test_problems_solved_a_fifth_to_four_fifths_of_the_time_are_kept_in_their_order() -> None:
    rates = {"never": 0.0, "just": 0.2, "rarely": 0.175, "half": 0.5, "often": 0.8, "nearly": 0.825, "always": 1.0}
    assert within_rates(rates, SETTINGS, 256) == ["just", "half", "often"]
    assert within_rates(rates, SETTINGS, 2) == ["just", "half"]


def test_a_problem_is_solved_by_a_reward_of_one_and_by_nothing_less() -> None:
    rollouts = [rollout("a", reward) for reward in (1.0, 2.0, 0.99, 0.0, -1.0, np.nan)]
    assert solved_by_problem(7, rollouts) == {"a": Solved(step=7, responses=6, solved=2, tokens=18)}


def test_too_few_problems_are_refused_with_the_flags_that_fix_it() -> None:
    rates = {"easy": 1.0, "easier": 0.9, "hard": 0.1, "right": 0.5}
    with pytest.raises(UsageError, match=r"1 of 4 candidates .* \(2 more often, 1 less\), fewer than the 2 .*harder"):
        require_enough(["right"], rates, SETTINGS, least=2)
    with pytest.raises(UsageError, match="an easier --task, or fewer --prompts-per-step"):
        require_enough([], {"hard": 0.0}, SETTINGS, least=1)
    require_enough(["right", "left"], rates, SETTINGS, least=2)


def test_bounds_that_keep_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--keep-low 0\.9 lies above --keep-high 0\.8"):
        parse_settings(SanitySettings, {"keep_low": 0.9})


@pytest.mark.parametrize(("candidates", "problems", "flag"), [(1, 256, "--candidates 1"), (8, 1, "--num-problems 1")])
def test_fewer_problems_than_a_step_samples_are_refused_at_once(candidates: int, problems: int, flag: str) -> None:
    train = settings()
    train = train.model_copy(update={"task": train.task.model_copy(update={"num_problems": problems})})
    with pytest.raises(UsageError, match=f"{flag} is fewer than the 2 problems of a step"):
        prepare_sanity(train, SETTINGS.model_copy(update={"candidates": candidates}))


@pytest.mark.slow
def test_the_test_is_passed_only_when_every_problem_has_been_seen(tmp_path: Path) -> None:
    test = sanity_test(tmp_path / "run")
    assert not test.reached(1, answers({"a": 4, "b": 4}))
    assert test.record.accuracy is None
    assert test.reached(2, answers({"c": 4}))
    assert test.record.passed
    assert test.record.verdict == "passed at step 2"


@pytest.mark.slow
def test_only_the_latest_responses_to_a_problem_count(tmp_path: Path) -> None:
    test = sanity_test(tmp_path / "run")
    assert not test.reached(1, answers({"a": 0, "b": 4, "c": 4}))
    assert test.record.accuracy is not None
    assert test.record.accuracy.value == pytest.approx(2 / 3)
    assert test.reached(2, answers({"a": 4}))
    assert not test.reached(3, answers({"b": 3}))


@pytest.mark.slow
def test_ninety_five_percent_does_not_pass_and_more_does(tmp_path: Path) -> None:
    test = sanity_test(tmp_path / "run", kept=["a"])
    assert not test.reached(1, answers({"a": 95}, of=100))
    assert test.reached(2, answers({"a": 96}, of=100))


def test_the_interval_takes_responses_to_one_problem_as_one_observation() -> None:
    def one(solved: int) -> Solved:
        return Solved(step=1, responses=8, solved=solved, tokens=80)

    alike = accuracy_of({f"{number}": one(8 * (number % 2)) for number in range(16)})
    mixed = accuracy_of({f"{number}": one(4) for number in range(16)})
    assert alike.value == mixed.value == 0.5
    assert alike.num_sequences == mixed.num_sequences == 128
    assert alike.num_tokens == 16 * 80
    assert width(alike.low, alike.high) > 2 * width(mixed.low, mixed.high)


def width(low: float | None, high: float | None) -> float:
    assert low is not None
    assert high is not None
    return high - low


@pytest.mark.slow
def test_what_was_seen_after_the_checkpoint_is_seen_again(tmp_path: Path) -> None:
    test = sanity_test(tmp_path / "run")
    test.reached(10, answers({"a": 4, "b": 0}))
    test.reached(11, answers({"c": 4}))
    read = test.directory.read_sanity()
    again = SanityTest(test.directory, test.preparation, read.model_copy(update=at_step(read, step=10)), test.tell)
    assert again.record.latest.keys() == {"a", "b"}
    assert again.record.accuracy is None
    again.reached(11, answers({"c": 4}))
    assert again.record == test.record


@pytest.mark.slow
def test_why_it_did_not_pass_is_recorded(tmp_path: Path) -> None:
    test = sanity_test(tmp_path / "run")
    test.reached(1, answers({"a": 1}))
    test.end("100 steps were not enough")
    recorded = test.directory.read_sanity()
    assert recorded.passed is False
    assert recorded.verdict == "not passed: 100 steps were not enough"


@pytest.fixture
def prepared() -> TrainingPreparation:
    return prepare_sanity(settings(), SETTINGS)


def test_candidates_are_tried_and_the_settings_stay_those_of_training(prepared: TrainingPreparation) -> None:
    assert len(prepared.problems) == 8
    assert prepared.settings.task.num_problems == prepared.manifest.settings.task.num_problems == 256


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"keep_low": 0.3}, {"solve_samples": 6}, {"keep_high": 0.9}])
def test_a_resume_with_another_choice_of_problems_is_refused(
    tmp_path: Path, prepared: TrainingPreparation, change: dict[str, float]
) -> None:
    start_training(tmp_path / "run", prepared)
    resume_training(tmp_path / "run", prepared)
    changed = prepare_sanity(settings(), SETTINGS.model_copy(update=change))
    with pytest.raises(UsageError, match="was started with other sanity"):
        resume_training(tmp_path / "run", changed)


@pytest.mark.slow
def test_train_does_not_continue_a_sanity_run_even_where_it_would_train_on_all_its_candidates(tmp_path: Path) -> None:
    start_training(tmp_path / "run", prepare_sanity(settings(), SETTINGS.model_copy(update={"candidates": 256})))
    with pytest.raises(UsageError, match="was started with other sanity"):
        resume_training(tmp_path / "run", prepare_training(settings()))


@pytest.mark.slow
def test_a_folder_without_a_sanity_test_is_told_so(tmp_path: Path) -> None:
    start_training(tmp_path / "run", prepare_training(settings()))
    assert TrainingDirectory(tmp_path / "run").is_run
    with pytest.raises(UsageError, match="no sanity test was started here"):
        SanityDirectory(tmp_path / "run").read_sanity()
