"""Experts of a log against those of the checkpoint that made it, a tiny mixture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain import explain
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.predictions import Predictions
from mismatch_probe.explain.recorded import agreement_of_experts
from mismatch_probe.explain.run import explain_with
from mismatch_probe.records.findings import ExpertAgreement
from mismatch_probe.records.sequences import IntArray, KeptSets, LoggedResponse
from mismatch_probe.report.answers.explain import experts_sentence, explain_answer
from mismatch_probe.training_path import Scorer
from tests.explain.logs import logged, sampled, scored, settings
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "moe", "qwen3-moe")


@pytest.fixture(scope="module")
def log(mixture: Path) -> list[LoggedResponse]:
    """With the experts of the training path in FP32, as an engine records them."""
    sequences = sampled(mixture, num_prompts=3, samples=4, num_tokens=24)
    with Scorer.load(mixture, Dtype.FP32, TrainingPathSettings(), temperature=1.0) as scorer:
        routing = scorer.routing(sequences)
    responses = logged(sequences, mu=scored(mixture, sequences, Dtype.FP32))
    return [
        replace(response, experts=np.ascontiguousarray(choice.experts.transpose(1, 0, 2)))
        for response, choice in zip(responses, routing, strict=True)
    ]


@pytest.fixture(scope="module")
def predictions(mixture: Path, log: list[LoggedResponse]):
    with Predictions.open(settings(mixture), LoggedTokens.of(log)) as predictions:
        yield predictions


def agreement(predictions: Predictions, log: Sequence[LoggedResponse]) -> ExpertAgreement:
    reading = agreement_of_experts(predictions.declared_model, LoggedTokens.of(log))
    assert reading is not None
    return reading


def changed(log: Sequence[LoggedResponse], change) -> list[LoggedResponse]:
    return [replace(response, experts=change(response.experts)) for response in log]


def test_the_checkpoints_own_experts_agree(predictions: Predictions, log: list[LoggedResponse]) -> None:
    reading = agreement(predictions, log)
    assert reading.agreement > 0.99
    assert (reading.layer_shift, reading.token_shift, reading.agreement_shifted) == (0, 0, None)
    assert "%" in experts_sentence(reading)


@pytest.mark.parametrize("by", [-1, 1, 2])
def test_experts_some_tokens_off_are_named(predictions: Predictions, log: list[LoggedResponse], by: int) -> None:
    reading = agreement(predictions, changed(log, lambda experts: np.roll(experts, by, axis=0)))
    assert (reading.layer_shift, reading.token_shift) == (0, by)
    assert ("late" if by > 0 else "early") in experts_sentence(reading)


@pytest.mark.parametrize("dense", [1, 2, 3])
def test_experts_behind_dense_layers_that_the_checkpoint_does_not_have_are_named(
    predictions: Predictions, log: list[LoggedResponse], dense: int
) -> None:
    """The log counts layers from others than the trainer does: its columns are shifted and filled up with zeros."""

    def shift(experts: IntArray) -> IntArray:
        return np.concatenate([np.zeros_like(experts[:, :1])] * dense + [experts], axis=1)

    reading = agreement(predictions, changed(log, shift))
    assert (reading.layer_shift, reading.token_shift) == (dense, 0)
    assert "behind" in experts_sentence(reading)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_other_experts_lower_the_agreement_and_no_shift_is_named(
    predictions: Predictions, log: list[LoggedResponse], share: float
) -> None:
    random = np.random.default_rng(3)

    def other(experts: IntArray) -> IntArray:
        is_other = random.random(experts.shape[:2]) < share
        return np.where(is_other[:, :, None], np.sort(experts, axis=2)[:, :, ::-1] + 1, experts)

    reading = agreement(predictions, changed(log, other))
    assert abs(reading.agreement - (1 - share)) < 0.1
    assert (reading.layer_shift, reading.token_shift) == (0, 0)


def test_the_answer_has_the_agreement(mixture: Path, log: list[LoggedResponse]) -> None:
    explanation = explain(settings(mixture, mu={"dtype": "fp32"}), log)
    assert explanation.experts is not None
    assert explanation.verdict.kind == "clean"
    assert any("experts" in fact for fact in explain_answer(explanation).facts)


def test_a_dense_model_has_no_agreement(llama: Path, log: list[LoggedResponse]) -> None:
    with Predictions.open(settings(llama), LoggedTokens.of(log)) as predictions:
        assert agreement_of_experts(predictions.declared_model, LoggedTokens.of(log)) is None


@pytest.mark.parametrize("top_k", [2, 8, 40])
def test_a_side_that_is_not_cut_to_the_recorded_sets_is_named(llama: Path, top_k: int) -> None:
    """mu is within the sets that it drew from, pi is not: the ratio is off, and the training path's side is why."""
    sequences = sampled(llama, num_prompts=4, samples=6, num_tokens=32, top_k=top_k)
    with Scorer.load(llama, Dtype.FP32, TrainingPathSettings(), temperature=1.0) as scorer:
        rows = [scorer.distributions(sequence, range(len(sequence.token_ids))) for sequence in sequences]
    own_by_all = scored(llama, sequences, Dtype.FP32)
    sets = [np.argsort(-row, axis=1)[:, :top_k] for row in rows]
    within = [
        own - np.log(np.exp(np.take_along_axis(row, kept, axis=1).astype(np.float64)).sum(axis=1))
        for own, row, kept in zip(own_by_all, rows, sets, strict=True)
    ]
    kept_sets = [
        KeptSets(kept.ravel().astype(np.int32), np.arange(1, len(kept) + 1, dtype=np.int64) * top_k) for kept in sets
    ]
    random = np.random.default_rng(0)  # an engine rounds otherwise than the training path
    mu, own = ([np.minimum(row + random.normal(0, 3e-6, row.size), 0) for row in within] for _ in range(2))
    in_fp32 = settings(llama, mu={"dtype": "fp32"}, pi={"dtype": "fp32"})
    tokens_by_all, tokens_in_sets = (
        LoggedTokens.of(
            [
                replace(response, kept=kept)
                for response, kept in zip(logged(sequences, mu=mu, pi=pi), kept_sets, strict=True)
            ]
        )
        for pi in (own_by_all, own)
    )
    with Predictions.open(in_fp32, tokens_in_sets) as predictions:
        explanation = explain_with(predictions, in_fp32, tokens_by_all)
        assert [side.verdict.kind for side in explanation.sides] == ["clean", "bug"]
        assert "training path" in explanation.verdict.sentence
        assert "nothing cut" in explanation.verdict.sentence
        clean_explanation = explain_with(predictions, in_fp32, tokens_in_sets)
        assert [side.verdict.kind for side in clean_explanation.sides] == ["clean", "clean"]
