"""Whole logs: both sides judged, clean ones not accused."""

from pathlib import Path

import pytest

from benchmarks.fault_lab.in_training import other_weights
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.explain import ExplainJob, explain, run_explain
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.sequences import TokenSequence
from tests.explain.conftest import ExplainedLog
from tests.explain.logs import logged, scored, settings


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16, Dtype.FP32])
def test_a_clean_log_is_as_declared(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog, dtype: Dtype
) -> None:
    log = logged(responses, mu=scored(llama, responses, dtype), pi=scored(llama, responses, dtype, attention="eager"))
    declared = {"dtype": dtype}
    explanation = explained_log(log, mu=declared, pi=declared)
    assert [side.verdict.code for side in explanation.sides] == ["as_declared", "as_declared"]
    assert (explanation.verdict.kind, explanation.verdict.code) == ("clean", "as_declared")


@pytest.mark.slow
def test_both_sides_can_depart_and_the_record_is_read_back(llama: Path, responses: list[TokenSequence]) -> None:
    log = logged(responses, mu=scored(llama, responses, temperature=0.7), pi=scored(llama, responses, Dtype.FP32))
    explanation = run_explain(ExplainJob(settings(llama), log))
    assert [side.verdict.code for side in explanation.sides] == ["temperature", "one_sided_dtype"]
    assert "the engine's side (mu)" in explanation.verdict.sentence.lower()
    assert Explanation.model_validate_json(explanation.model_dump_json()) == explanation


def test_a_log_without_log_probs_is_refused(llama: Path, responses: list[TokenSequence]) -> None:
    with pytest.raises(UsageError, match="log-probs of neither side"):
        explain(settings(llama), logged(responses))


def test_ids_of_another_model_are_refused(llama: Path) -> None:
    foreign = [TokenSequence("line 1", [1, 2], [5000])]
    with pytest.raises(UsageError, match="outside the model's"):
        explain(settings(llama), logged(foreign, mu=[[-1.0]]))


@pytest.mark.slow
def test_a_checkpoint_that_made_neither_side_is_told(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog, tmp_path: Path
) -> None:
    other = other_weights(llama, tmp_path / "other", 0.05)
    columns = scored(other, responses)
    explanation = explained_log(logged(responses, mu=columns, pi=scored(other, responses, attention="eager")))
    assert (explanation.verdict.kind, explanation.verdict.code) == ("undecided", "other_checkpoint")
    assert explanation.sides[0].left_out["other weights"].startswith("none were given")


@pytest.mark.slow
def test_what_both_sides_do_alike_is_no_mismatch(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog
) -> None:
    columns = scored(llama, responses, temperature=0.7)
    explanation = explained_log(logged(responses, mu=columns, pi=columns))
    assert explanation.verdict.code == "temperature"
    assert explanation.verdict.sentence.startswith("Both sides depart alike")
