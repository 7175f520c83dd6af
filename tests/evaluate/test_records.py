"""From the files of a run to its accuracies."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.evaluate.estimates import Marker
from mismatch_probe.evaluate.run import evaluate_records
from mismatch_probe.records.answers import Evaluation, EvaluationDirectory
from mismatch_probe.records.tables import read_table, write_table
from mismatch_probe.report.answers.evaluate import sentence
from mismatch_probe.tasks.rewards import Reward
from tests.simulated_run import Simulation, edit_leg, simulated_prompts, simulated_run
from tests.tiny_models import byte_tokenizer

SIMULATION = Simulation(
    num_prompts=40,
    samples_per_prompt=2,
    mean_length=20,
    pairs=((Dtype.FP16, Dtype.FP16), (Dtype.BF16, Dtype.BF16), (Dtype.BF16, Dtype.FP16)),
)


def parity(prompt: Any, text: str) -> int:
    """Right where the text has an even number of characters."""
    return 1 - len(text) % 2


def evaluated(
    run: EvaluationDirectory, reward: Callable[[Any, str], Any] = parity, *, sample_pi: bool = False
) -> Evaluation:
    record = Evaluation(
        tool_version="0",
        model="simulated",
        model_fingerprint="a",
        task="sums",
        settings=EvaluationSettings(sample_pi=sample_pi),
    )
    marker = Marker(simulated_prompts(SIMULATION), byte_tokenizer(), Reward("parity", reward))
    return evaluate_records(run, run.read_manifest(), marker, record)


def edit_rollouts(run: EvaluationDirectory, change: Callable[[dict[str, Any]], None]) -> None:
    table = read_table(run.rollouts_path)
    columns = table.to_pydict()
    change(columns)
    write_table(run.rollouts_path, pa.table(columns, schema=table.schema))


@pytest.fixture
def run(tmp_path: Path) -> EvaluationDirectory:
    return EvaluationDirectory(simulated_run(tmp_path / "run", SIMULATION).path)


def rewards_of(run: EvaluationDirectory, sampler: str) -> dict[str, int]:
    """What each response earns, by id, decoded one by one."""
    rollouts = read_table(run.rollouts_path).to_pylist()
    tokenizer = byte_tokenizer()
    return {
        row["id"]: parity(None, tokenizer.decode(row["token_ids"], skip_special_tokens=True))
        for row in rollouts
        if row["sampler"] == sampler
    }


def test_accuracy_under_mu_is_the_mean_reward_of_the_engines_responses(run: EvaluationDirectory) -> None:
    evaluation = evaluated(run)
    assert [engine.infer_dtype for engine in evaluation.engines] == ["fp16", "bf16"]
    for engine in evaluation.engines:
        rewards = rewards_of(run, f"infer-{engine.infer_dtype}")
        assert engine.accuracy.value == pytest.approx(np.mean(list(rewards.values())))
        assert engine.accuracy.num_sequences == 80
    assert evaluation.differences[0].difference.value == pytest.approx(
        evaluation.engines[0].accuracy.value - evaluation.engines[1].accuracy.value
    )


def test_accuracy_under_pi_weighs_each_response_by_its_own_log_probs(run: EvaluationDirectory) -> None:
    rewards = rewards_of(run, "infer-fp16")

    def sums(leg: str) -> dict[str, float]:
        rows = read_table(run.leg_path(leg)).to_pylist()
        return {row["id"]: float(np.sum(row["logprobs"])) for row in rows}

    pi, mu = sums("train-bf16"), sums("infer-fp16-decode")
    weights = {key: np.exp(pi[key] - mu[key]) for key in rewards}
    by_hand = sum(weights[key] * rewards[key] for key in rewards) / sum(weights.values())
    pair = evaluated(run).pairs[2]
    assert (pair.train_dtype, pair.infer_dtype) == ("bf16", "fp16")
    assert pair.under_pi is not None
    assert pair.under_mu is not None
    assert pair.gap is not None
    assert pair.under_pi.value == pytest.approx(by_hand, rel=1e-5)
    assert pair.gap.value == pytest.approx(by_hand - pair.under_mu.value, abs=1e-6)


@pytest.mark.slow
def test_a_truncated_response_earns_nothing(run: EvaluationDirectory) -> None:
    before = evaluated(run).engines[0]

    def truncate(columns: dict[str, Any]) -> None:
        columns["finish_reason"][:10] = ["length"] * 10

    lost = sum(list(rewards_of(run, "infer-fp16").values())[:10])
    edit_rollouts(run, truncate)
    after = evaluated(run).engines[0]
    assert after.truncated_responses == 10
    assert lost > 0
    assert after.accuracy.value == pytest.approx(before.accuracy.value - lost / 80)


def test_responses_without_log_probs_are_left_out_of_the_gap_and_counted(run: EvaluationDirectory) -> None:
    def blank(columns: dict[str, Any]) -> None:
        columns["logprobs"][3][1] = np.nan

    edit_leg(run, "train-fp16", blank)
    evaluation = evaluated(run)
    assert [pair.responses_left_out for pair in evaluation.pairs] == [1, 0, 0]
    assert evaluation.engines[0].accuracy.num_sequences == 80
    assert evaluation.pairs[0].under_mu is not None
    assert evaluation.pairs[0].under_mu.num_sequences == 79


def test_a_pair_with_no_usable_response_says_so(run: EvaluationDirectory) -> None:
    def blank(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[np.nan] * len(row) for row in columns["logprobs"]]

    edit_leg(run, "train-fp16", blank)
    pair = evaluated(run).pairs[0]
    assert pair.under_pi is None
    assert pair.responses_left_out == 80
    assert "cannot be estimated" in sentence(pair)


def test_a_reward_that_is_no_number_is_named(run: EvaluationDirectory) -> None:
    with pytest.raises(UsageError, match="reward parity gave nan for a response to prompt sums-0"):
        evaluated(run, lambda prompt, text: float("nan"))


@pytest.mark.slow
def test_pis_own_responses_are_set_against_mus_problem_by_problem(run: EvaluationDirectory) -> None:
    rollouts = read_table(run.rollouts_path)
    own = rollouts.filter(pa.array([name == "infer-fp16" for name in rollouts["sampler"].to_pylist()]))
    for dtype in ("fp16", "bf16"):
        write_table(run.pi_rollouts_path(run.read_manifest().settings.pi(dtype)), own)
    same, other, _ = evaluated(run, sample_pi=True).pairs
    assert same.direct is not None
    assert other.direct is not None
    assert same.direct.gap.value == 0
    assert same.direct.accuracy.value == other.direct.accuracy.value
    assert other.under_mu is not None
    assert other.direct.gap.value == pytest.approx(other.direct.accuracy.value - other.under_mu.value)


def test_pis_responses_that_are_missing_are_no_silent_pass(run: EvaluationDirectory) -> None:
    with pytest.raises(BrokenRecord, match="is missing"):
        evaluated(run, sample_pi=True)


@pytest.mark.slow
def test_policies_too_far_apart_are_told_to_sample_pi(run: EvaluationDirectory) -> None:
    def shift(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [
            [value - 0.3 * (row % 3 > 0) for value in logprobs] for row, logprobs in enumerate(columns["logprobs"])
        ]

    edit_leg(run, "train-fp16", shift)
    pair = evaluated(run).pairs[0]
    assert pair.gap is None
    assert "--sample-pi" in sentence(pair)


def test_a_sentence_says_what_deployment_loses_or_that_nothing_is_seen(run: EvaluationDirectory) -> None:
    pair = evaluated(run).pairs[0]
    assert pair.gap is not None

    def message_of(low: float, high: float) -> str:
        gap = pair.gap
        assert gap is not None
        return sentence(pair.model_copy(update={"gap": replace(gap, value=(low + high) / 2, low=low, high=high)}))

    assert message_of(0.01, 0.03).endswith("deployment loses 0.020 [0.010, 0.030] of accuracy")
    assert message_of(-0.03, -0.01).endswith("deployment gains 0.020 [0.010, 0.030] of accuracy")
    assert message_of(-0.01, 0.03).endswith("no gap seen; one beyond 0.0300 would have been seen")
