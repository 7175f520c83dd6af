"""What happened to the log's lines after the log-probs were computed."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.records.sequences import FloatArray, TokenSequence
from tests.explain.conftest import Explained, ExplainedLog
from tests.explain.logs import logged, sampled, scored

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("by", [1, -1])
def test_shifted_labels_are_named(llama: Path, responses: list[TokenSequence], explained: Explained, by: int) -> None:
    side = explained([np.roll(one, by) for one in scored(llama, responses)])
    assert side.verdict.code == "label_offset"
    assert side.explained_by is not None
    assert side.explained_by.departures[0].value == -by


@pytest.mark.parametrize("base", [2, 10])
def test_logarithms_to_another_base_are_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, base: int
) -> None:
    side = explained([one / np.log(base) for one in scored(llama, responses)])
    assert side.verdict.code == "other_base"
    assert f"logarithms to base {base}" in side.verdict.sentence
    assert side.explained_by is not None
    assert side.explained_by.departures[0].value == base


@pytest.mark.parametrize("count", [2, 10, 44])
def test_exchanged_responses_are_named_and_counted(
    llama: Path, responses: list[TokenSequence], explained: Explained, count: int
) -> None:
    columns = scored(llama, responses)
    side = explained(exchanged(columns, count))
    assert side.verdict.code == "mispaired"
    assert side.explained_by is not None
    assert side.explained_by.departures[0].value == count


@pytest.mark.parametrize("value", [0.0, -9999.0, float("nan"), float("-inf")])
def test_missing_log_probs_are_counted_and_left_out(
    llama: Path, responses: list[TokenSequence], explained: Explained, value: float
) -> None:
    columns = scored(llama, responses, temperature=0.7)
    spoiled = 0
    random = np.random.default_rng(0)
    for column in columns:
        places = random.random(len(column)) < 0.02
        spoiled += int(places.sum())
        column[places] = value
    side = explained(columns)
    assert (side.verdict.kind, side.verdict.code) == ("broken", "missing_logprobs")
    assert side.num_missing == spoiled
    assert [cause.code for cause in side.verdict.also] == ["temperature"]


def with_gaps(columns: list[FloatArray]) -> list[FloatArray]:
    """Every eighth response was not recorded."""
    return [np.full_like(column, np.nan) if number % 8 == 7 else column for number, column in enumerate(columns)]


def test_a_bug_comes_before_log_probs_that_are_missing(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog
) -> None:
    log = logged(responses, mu=scored(llama, responses, temperature=0.7), pi=with_gaps(scored(llama, responses)))
    explanation = explained_log(log)
    assert (explanation.verdict.kind, explanation.verdict.code) == ("bug", "temperature")
    assert [cause.code for cause in explanation.verdict.also] == ["missing_logprobs"]


def test_missing_log_probs_alone_are_the_answer(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog
) -> None:
    log = logged(responses, mu=scored(llama, responses), pi=with_gaps(scored(llama, responses)))
    explanation = explained_log(log)
    assert (explanation.verdict.kind, explanation.verdict.code) == ("broken", "missing_logprobs")


def test_a_column_of_zeros_is_missing_and_nothing_else_is_said(
    responses: list[TokenSequence], explained: Explained
) -> None:
    side = explained([np.zeros(len(response.token_ids)) for response in responses])
    assert side.verdict.code == "missing_logprobs"
    assert (side.num_tokens, side.trials, side.verdict.also) == (0, [], [])


def test_zeros_of_certain_tokens_are_log_probs(
    llama: Path, responses: list[TokenSequence], explained: Explained
) -> None:
    columns = [np.where(one > -0.9, 0.0, one) for one in scored(llama, responses)]
    assert any((column == 0).any() for column in columns)
    assert explained(columns).num_missing == 0


def exchanged(columns: list[FloatArray], count: int) -> list[FloatArray]:
    """Some responses in a circle of each other's log-probs."""
    chosen = np.random.default_rng(0).permutation(len(columns))[:count]
    found = list(columns)
    for row, donor in zip(chosen, np.roll(chosen, 1), strict=True):
        found[row] = np.resize(columns[donor], len(columns[row]))
    return found


def test_log_probs_of_responses_outside_the_sample_are_told_by_their_tokens(
    llama: Path, responses: list[TokenSequence], explained: Explained
) -> None:
    columns = scored(llama, responses)
    elsewhere = scored(llama, sampled(llama, num_prompts=3, samples=1, seed=5))
    for row, other in enumerate(elsewhere):
        columns[row] = np.resize(other, len(columns[row]))
    side = explained(columns)
    assert side.verdict.code == "mispaired"
    assert "not in the sample" in side.verdict.evidence[0]
