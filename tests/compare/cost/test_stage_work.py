"""What a stage computes grows with what it is given, and is nothing where it has nothing to do."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_probe.compare.cost.roofline import Work
from mismatch_probe.compare.cost.stage_work import key_of, work_of
from mismatch_probe.compare.plan import TRAINING_PATH, make_plan
from mismatch_probe.compare.stages import Stage
from mismatch_probe.dtypes import Dtype
from tests.compare.cost.workloads import ARCHITECTURE, rates, settings, stage, workload

STAGES = make_plan(settings()).stages
SECONDS = rates("engine", Dtype.BF16).seconds


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize(
    "more",
    [
        {"prompts": 9},
        {"prompt_tokens": 21},
        {"response_tokens": 25},
        {"architecture": replace(ARCHITECTURE, num_layers=3, token_flops=260_000)},
    ],
    ids=["more prompts", "longer prompts", "longer responses", "more layers"],
)
def test_more_takes_longer(stage: Stage, more: dict[str, Any]) -> None:
    few: dict[str, Any] = {"response_tokens": 20}
    assert SECONDS(work_of(stage, workload(**few | more))) > SECONDS(work_of(stage, workload(**few)))


def test_every_stage_is_of_the_process_that_runs_it() -> None:
    for job in make_plan(settings()).jobs:
        expected = "training" if job.name == TRAINING_PATH else "engine"
        assert {key_of(stage).process for stage in job.stages} == {expected}


def test_sequences_take_one_pass_at_least() -> None:
    """A 20th of a pass of 2,048 tokens is one call of the model all the same."""
    alone, twenty = (work_of(stage("score-train-bf16"), workload(prompts=each)).operations for each in (1, 20))
    assert alone == twenty > 0


def test_a_scoring_pass_is_what_was_counted_for_its_tokens_and_half_of_their_pairs() -> None:
    """8 sequences of 70 tokens; a causal kernel leaves out the other half."""
    scoring = work_of(stage("score-train-bf16"), workload())
    tokens, sequences = 8 * 70, 8
    assert scoring.matrix_flops == tokens * (ARCHITECTURE.token_flops + ARCHITECTURE.head_flops)
    assert scoring.attention_flops == sequences * 70**2 * ARCHITECTURE.pair_flops / 2


def test_attention_is_counted_within_the_window_of_an_engine_and_masked_in_full_on_the_training_path() -> None:
    """8 sequences of 70 tokens; half of the layers see 16 tokens."""
    sliding = workload(architecture=replace(ARCHITECTURE, window=16, windowed_share=0.5))
    layer, causal = ARCHITECTURE.pair_flops / 2, 70**2 / 2
    replaying = work_of(stage("replay-bf16"), sliding)
    assert replaying.attention_flops == 8 * layer * (causal + 16 * 70 - 16**2 / 2)
    scoring = work_of(stage("score-train-bf16"), sliding)
    assert scoring.attention_flops == 8 * layer * (causal + 70**2)


def test_decoding_reads_no_keys_behind_the_window() -> None:
    """8 prompts of 20 tokens, 50 tokens decoded after each: 45 tokens back at the mean, and 16 in a window."""
    full, sliding = (
        work_of(stage("sample-bf16"), workload(architecture=each)).memory_bytes
        for each in (ARCHITECTURE, replace(ARCHITECTURE, window=16, windowed_share=0.5))
    )
    key_and_value = 2 * ARCHITECTURE.num_kv_heads * ARCHITECTURE.head_dim * Dtype.BF16.num_bytes
    assert full - sliding == 8 * 50 * (45 - 16) * key_and_value


def test_sequences_within_the_window_are_causal_on_both_sides() -> None:
    wide = workload(architecture=replace(ARCHITECTURE, window=70, windowed_share=1.0))
    for name in ("replay-bf16", "score-train-bf16"):
        assert work_of(stage(name), wide) == work_of(stage(name), workload())


def test_decoding_computes_the_head_once_for_each_prompt_and_each_token() -> None:
    """8 prompts of 20 tokens, 50 tokens decoded after each."""
    sampling = work_of(stage("sample-bf16"), workload())
    assert sampling.matrix_flops == 8 * 70 * ARCHITECTURE.token_flops + 8 * 51 * ARCHITECTURE.head_flops


def test_sampling_takes_a_step_for_each_token_of_the_longest_response() -> None:
    short, long = (workload(response_tokens=10), workload(response_tokens=10))
    long = replace(long, responses=replace(long.responses, longest_tokens=40))
    added = work_of(stage("sample-bf16"), long).memory_bytes - work_of(stage("sample-bf16"), short).memory_bytes
    assert added == pytest.approx(30 * ARCHITECTURE.parameters * 2)


def with_args(args: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"batch_sequences": 64, "args": args}}


def test_no_more_sequences_run_at_once_than_the_engine_takes() -> None:
    reads = [
        work_of(stage("sample-bf16", **changes), workload(prompts=64, **changes)).memory_bytes
        for changes in (with_args({}), with_args({"max_num_seqs": 16}))
    ]
    more_steps = 3 * 50
    assert reads[1] - reads[0] == pytest.approx(more_steps * ARCHITECTURE.parameters * 2)


def test_ranks_share_the_arithmetic_of_an_engine_alone() -> None:
    alone, shared = with_args({}), with_args({"tensor_parallel_size": 2})
    for name, ranks in (("sample-bf16", 2), ("replay-bf16", 2), ("score-train-bf16", 1)):
        flops = [work_of(stage(name, **changes), workload(**changes)).matrix_flops for changes in (alone, shared)]
        assert flops[1] == flops[0] / ranks


def test_a_side_with_a_checkpoint_of_its_own_takes_what_that_takes() -> None:
    changes = {"infer": [{"name": "large", "dtype": "bf16", "checkpoint": "other"}], "pairs": [["bf16", "large"]]}
    sizes = workload(**changes)
    twice = replace(ARCHITECTURE, token_flops=2 * ARCHITECTURE.token_flops)
    sizes = replace(sizes, architectures={**sizes.architectures, "other": twice})
    its, own = (work_of(stage(name, **changes), sizes) for name in ("replay-large", "score-train-bf16"))
    assert its.matrix_flops > 1.5 * own.matrix_flops


def test_rounding_weights_to_what_they_are_stored_in_is_no_work() -> None:
    rounded = stage("score-ref-fp32-weights-bf16")
    assert work_of(rounded, workload(checkpoint_dtype=Dtype.BF16)) == Work()
    assert work_of(rounded, workload(checkpoint_dtype=Dtype.FP32)) != Work()
