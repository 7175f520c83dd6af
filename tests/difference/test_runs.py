import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.sides import InferSide
from mismatch_probe.difference.runs import changes, difference_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, ExitCode, UsageError
from mismatch_probe.records.answers import Difference
from mismatch_probe.records.tables import read_table, write_table
from mismatch_probe.stats.sequences import MISSING_LOG_PROB
from tests.gate.cli import CommandLine
from tests.simulated_run import Simulation, edit_leg, edit_manifest, simulated_run

pytestmark = pytest.mark.slow

SMALL = Simulation(num_prompts=48)


def found(tmp_path: Path, second: Simulation, first: Simulation = SMALL) -> Difference:
    return difference_of(simulated_run(tmp_path / "a", first), simulated_run(tmp_path / "b", second))


def test_a_run_against_itself_changes_nothing(tmp_path: Path) -> None:
    [pair] = found(tmp_path, SMALL).pairs
    assert pair.comparison == "paired"
    assert pair.metrics["kl_k3"].difference is not None
    assert pair.metrics["kl_k3"].difference.value == 0
    assert pair.sentence.startswith("no difference can be seen in the mean deviation of a token, abs(d): it is 0.")
    assert pair.sentence.endswith(" nats in both runs")


def test_a_worse_run_is_found_worse_and_the_other_way_round_better(tmp_path: Path) -> None:
    worse = replace(SMALL, worse=1.6, noise_seed=1)
    [pair] = found(tmp_path / "one", worse).pairs
    [back] = found(tmp_path / "two", SMALL, first=worse).pairs
    assert "the second run is worse" in pair.sentence
    assert "the second run is better" in back.sentence
    ahead, behind = pair.metrics["abs_logprob_diff"].ratio, back.metrics["abs_logprob_diff"].ratio
    assert ahead is not None
    assert behind is not None
    assert ahead.value == pytest.approx(1 / behind.value)


def lose_a_token(columns: dict[str, Any]) -> None:
    columns["logprobs"][0][0] = MISSING_LOG_PROB


def test_broken_data_has_no_ratio_to_the_other_run(tmp_path: Path) -> None:
    first, second = simulated_run(tmp_path / "a", SMALL), simulated_run(tmp_path / "b", replace(SMALL, worse=3.0))
    edit_leg(second, "train-bf16", lose_a_token)
    [pair] = difference_of(first, second).pairs
    assert pair.sentence.startswith("no ratio, because the data of the second run is broken; ")
    assert all(metric.ratio is None for metric in pair.metrics.values())
    assert all(part.abs_logprob_diff.ratio is None for part in (*pair.by_position, *pair.by_response_length))
    assert pair.metrics["abs_logprob_diff"].difference is not None


def test_a_bug_has_no_ratio_to_the_other_run(tmp_path: Path) -> None:
    first = simulated_run(tmp_path / "a", SMALL, with_summary=True)
    second = simulated_run(tmp_path / "b", SMALL, with_summary=True)
    summary = second.read_summary()
    verdict = summary.pairs[0].verdict.model_copy(update={"kind": "bug", "code": "label_offset"})
    second.write_summary(
        summary.model_copy(update={"pairs": [summary.pairs[0].model_copy(update={"verdict": verdict})]})
    )
    [pair] = difference_of(first, second).pairs
    assert pair.no_ratio == "the second run is a bug (label offset)"
    assert pair.metrics["kl_k3"].ratio is None


def test_the_side_that_moved_is_named_where_the_tokens_are_the_same(tmp_path: Path) -> None:
    [pair] = found(tmp_path, replace(SMALL, worse=1.6)).pairs
    assert pair.moved["mu"].value == 0
    assert pair.moved["pi"].value > 0.001
    [apart] = found(tmp_path / "apart", replace(SMALL, token_seed=1)).pairs
    assert apart.moved == {}


def test_other_responses_to_the_same_prompts_are_two_samples(tmp_path: Path) -> None:
    [pair] = found(tmp_path, replace(SMALL, token_seed=1)).pairs
    assert (pair.comparison, pair.same_responses, pair.shared_prompts) == ("two-sample", 0, 48)


def test_a_run_that_grew_is_still_compared_in_pairs(tmp_path: Path) -> None:
    [pair] = found(tmp_path, replace(SMALL, num_prompts=60)).pairs
    assert (pair.comparison, pair.same_responses, pair.shared_prompts) == ("paired", 48, 48)


def test_what_changed_in_versions_and_settings_is_named(tmp_path: Path) -> None:
    changes = found(tmp_path, replace(SMALL, vllm="0.33.0", sampling={"temperature": 0.7})).changes
    assert {str(change) for change in changes} == {"vllm 0.32.0 -> 0.33.0", "sampling.temperature 1.0 -> 0.7"}
    assert found(tmp_path / "same", SMALL).changes == []


def test_an_engine_argument_reads_the_same_by_flag_and_by_file(tmp_path: Path) -> None:
    before, after = (simulated_run(tmp_path / name, SMALL) for name in ("before", "after"))
    by_flag = {"block_size": "32", "enforce_eager": "True", "max_num_seqs": "2"}
    by_file = {"block_size": 32, "enforce_eager": True, "max_num_seqs": 3}
    for run, args in ((before, by_flag), (after, by_file)):
        edit_manifest(run, lambda manifest, args=args: manifest.settings.engine.args.update(args))
    assert [str(change) for change in difference_of(before, after).changes] == ["engine.args.max_num_seqs 2 -> 3"]


def test_a_side_that_was_added_is_named_with_what_it_was_given(tmp_path: Path) -> None:
    before = simulated_run(tmp_path / "run", SMALL).read_manifest()
    side = InferSide(name="fp8kv", dtype=Dtype.BF16, prefix_caching=False, args={"kv_cache_dtype": "fp8"})
    settings = before.settings.model_copy(
        update={"infer": (side,), "pairs": (*before.settings.pairs, ("bf16", "fp8kv"))}
    )
    pairs = ", ".join("/".join(pair) for pair in before.settings.pairs)
    assert {str(change) for change in changes(before, before.model_copy(update={"settings": settings}))} == {
        "infer.fp8kv.dtype absent -> bf16",
        "infer.fp8kv.prefix_caching absent -> false",
        "infer.fp8kv.args.kv_cache_dtype absent -> fp8",
        f"pairs {pairs} -> {pairs}, bf16/fp8kv",
    }


def test_what_reads_alike_and_differs_is_told_apart(tmp_path: Path) -> None:
    before, after = (simulated_run(tmp_path / name, SMALL) for name in ("before", "after"))
    for run, cores in ((before, "2"), (after, 2)):
        edit_manifest(run, lambda manifest, cores=cores: manifest.hardware.update(cpu_cores=cores))
    assert [str(change) for change in difference_of(before, after).changes] == ["cpu_cores '2' -> 2"]


def test_other_instruction_sets_are_a_change_where_both_runs_recorded_theirs(tmp_path: Path) -> None:
    old, new, other = (simulated_run(tmp_path / name, SMALL) for name in ("old", "new", "other"))
    for run, sets in ((new, "avx2, avx512f"), (other, "avx2")):
        edit_manifest(run, lambda manifest, sets=sets: manifest.hardware.update(cpu_instructions=sets))
    assert difference_of(old, new).changes == []
    assert [change.name for change in difference_of(new, other).changes] == ["cpu_instructions"]


def test_bins_hold_every_token_once(tmp_path: Path) -> None:
    [pair] = found(tmp_path, SMALL).pairs
    for bins in (pair.by_position, pair.by_response_length):
        assert sum(part.abs_logprob_diff.first.num_tokens for part in bins) == pair.first_counts.num_tokens


def test_pairs_of_dtypes_match_by_name_and_two_single_ones_each_other(tmp_path: Path) -> None:
    both = replace(SMALL, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16)))
    first = found(tmp_path / "one", SMALL, first=both)
    assert ([pair.first_pair for pair in first.pairs], first.only_first) == (["bf16/bf16"], ["fp16/fp16"])
    [pair] = found(tmp_path / "two", replace(SMALL, pairs=((Dtype.FP16, Dtype.FP16),))).pairs
    assert (pair.first_pair, pair.second_pair) == ("bf16/bf16", "fp16/fp16")
    assert "the second run is better" in pair.sentence
    with pytest.raises(UsageError, match="no pair of dtypes in common"):
        found(tmp_path / "three", replace(SMALL, pairs=((Dtype.FP32, Dtype.FP32),)), first=both)


def test_a_run_without_a_response_cannot_be_compared(tmp_path: Path) -> None:
    run, empty = simulated_run(tmp_path / "a", SMALL), simulated_run(tmp_path / "b", SMALL)
    for path in (empty.rollouts_path, *map(empty.leg_path, ("train-bf16", "infer-bf16-decode", "ref-fp32"))):
        write_table(path, read_table(path).slice(0, 0))
    with pytest.raises(BrokenRecord, match="no usable response"):
        difference_of(run, empty)


def test_the_command_prints_one_document_and_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_run(tmp_path / "a", SMALL)
    simulated_run(tmp_path / "b", replace(SMALL, vllm="0.33.0"))
    ended = CommandLine(capsys, monkeypatch)("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert ended.code == ExitCode.PASS
    assert Difference.model_validate(json.loads(ended.stdout)).pairs
    assert "vllm 0.32.0 -> 0.33.0" in ended.stderr
    assert "abs(d) at positions" in ended.stderr


def test_an_empty_text_is_shown_where_a_run_has_it(tmp_path: Path) -> None:
    """A column that is empty in every row is left out, so that the first run would seem to have no part in it."""
    first = simulated_run(tmp_path / "run", SMALL).read_manifest()
    texts = [first.model_copy(update={"versions": {"build": text}}) for text in ("", "a")]
    [change] = [change for change in changes(*texts) if change.name == "build"]
    assert (change.first, change.second) == ("''", "a")
