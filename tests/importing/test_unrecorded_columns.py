"""Columns that hold no log-probs of their tokens: missing, copied, not computed, shifted, of the wrong sign."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.zeros import draw
from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.selection import chosen_prompts
from mismatch_probe.records.tables import read_table
from tests.importing.imported import imported, pair_of
from tests.importing.logs import mean_abs, row, rows, write

pytestmark = pytest.mark.slow


def test_numbers_far_above_0_are_of_the_wrong_sign_and_nothing_else_is_printed(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    written = rows()
    written[3]["train_logprobs"][7] = 1e308
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT))
    assert pair.verdict.code == "wrong_sign"
    assert not [str(one.message) for one in recwarn if issubclass(one.category, RuntimeWarning)]


def test_log_probs_that_are_missing_are_counted_and_in_no_number(tmp_path: Path) -> None:
    written = rows()
    written[0]["logprobs"][3] = None
    written[1]["train_logprobs"][3] = -9999.0
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    counts = pair.counts
    assert (counts.missing_mu, counts.missing_pi, counts.left_out_tokens, counts.partial_responses) == (1, 1, 2, 2)
    assert (counts.num_sequences, counts.num_tokens) == (len(written), 30 * len(written) - 2)
    assert pair.verdict.kind != "broken"
    token, sequence = pair.metrics["abs_logprob_diff"], pair.metrics["kl_k1_seq"]
    for one in written[:2]:
        one["mask"] = [position != 3 for position in range(30)]
        one["logprobs"][3] = one["train_logprobs"][3] = 0.0
    assert token.value == pytest.approx(mean_abs(written), rel=1e-12)
    assert (token.num_sequences, sequence.num_sequences) == (len(written), len(written) - 2)
    sums = [np.subtract(one["logprobs"], one["train_logprobs"]).sum() for one in written[2:]]
    assert sequence.value == pytest.approx(np.mean(sums), rel=1e-9)


@pytest.mark.parametrize("value", [-101.0, -720.0, -900.0, -9998.0])
def test_a_sampled_token_that_no_sampler_draws_is_missing_and_leaves_numbers_of_the_others(
    tmp_path: Path, value: float
) -> None:
    written = rows()
    written[0]["logprobs"][3] = value
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert (pair.counts.missing_mu, pair.counts.left_out_tokens) == (1, 1)
    assert pair.metrics["kl_k3"].value < 1


@pytest.mark.parametrize("value", [-101.0, -720.0, -900.0, -9000.0])
def test_a_trainers_log_prob_however_low_is_measured(tmp_path: Path, value: float) -> None:
    written = rows()
    written[0]["train_logprobs"][3] = value
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert pair.counts.missing_pi == 0
    assert pair.metrics["abs_logprob_diff_max"].value == pytest.approx(-value, abs=20)


def test_where_every_response_lacks_a_token_tokens_are_measured_and_whole_responses_are_not(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["logprobs"][4] = None
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert pair.counts.partial_responses == len(written)
    assert pair.metrics["abs_logprob_diff"].num_tokens == 29 * len(written)
    assert "ess_seq" not in pair.metrics
    assert "all its tokens" in pair.metrics_unavailable["ess_seq"]
    assert pair.length is None


def test_a_log_that_lacks_most_tokens_is_broken(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["logprobs"][4:24] = [None] * 20
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT))
    assert (pair.verdict.kind, pair.verdict.code) == ("broken", "missing_logprobs")


@pytest.mark.parametrize("column", ["train_logprobs", "ref_logprobs"])
def test_a_column_that_copies_the_samplers_is_not_taken_for_a_second_opinion(tmp_path: Path, column: str) -> None:
    written = rows()
    for one in written:
        one[column] = one["logprobs"]
    wanted = ExitCode.INCONCLUSIVE if column == "train_logprobs" else ExitCode.PASS
    origin = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=wanted).read_manifest().log
    assert origin is not None
    assert [note.code for note in origin.notes if note.level == "missing"] == ["copied"]


def test_steps_whose_trainers_side_was_not_computed_are_left_out_and_named(tmp_path: Path) -> None:
    """NeMo-RL writes zeros where it skips the pass."""
    written = [row(number, step=number // 8) for number in range(24)]
    for one in written[8:16]:
        one["train_logprobs"] = [0.0] * 30
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    pair, origin = pair_of(run), run.read_manifest().log
    assert [one.step for one in pair.steps] == [0, 2]
    assert pair.counts.num_sequences == 16
    assert origin is not None
    (note,) = (one for one in origin.notes if one.level == "missing")
    assert (note.code, note.evidence["steps"]) == ("all_zero", [1])


def test_zeros_that_stand_for_missing_numbers_are_left_out_as_nulls_are(tmp_path: Path) -> None:
    zeros, nulls = rows(), rows()
    for number in range(0, len(zeros), 3):
        zeros[number]["logprobs"][5] = 0.0
        nulls[number]["logprobs"][5] = None
    pairs = []
    for name, written in (("zeros", zeros), ("nulls", nulls)):
        (tmp_path / name).mkdir()
        pairs.append(pair_of(imported(tmp_path / name, write(tmp_path / f"{name}.jsonl", written))))
    of_zeros, of_nulls = pairs
    assert of_zeros.counts.missing_mu == of_nulls.counts.missing_mu == 8
    assert of_zeros.counts.left_out_tokens == 8
    assert of_zeros.metrics == of_nulls.metrics
    assert of_zeros.verdict.kind == of_nulls.verdict.kind != "broken"


def test_honest_zeros_beside_other_weights_are_a_mismatch_and_no_broken_log(tmp_path: Path) -> None:
    drawn = draw(np.random.default_rng(3), (24, 30), 2.5, None, 3.0)
    written = rows()
    for one, log_mu, log_pi in zip(written, drawn.log_mu, drawn.log_pi, strict=True):
        one |= {"logprobs": log_mu.tolist(), "train_logprobs": log_pi.tolist()}
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert (drawn.log_mu == 0).sum() > 100
    assert pair.counts.missing_mu == 0
    assert pair.verdict.kind == "bug"


@pytest.mark.parametrize("column", ["logprobs", "train_logprobs"])
def test_zeros_of_a_sampler_that_is_sure_are_measured(tmp_path: Path, column: str) -> None:
    """Top-p 0.98: nine tokens in ten are alone in their nucleus, and no other log-prob is nearly 0."""
    written = rows(60)
    for number, one in enumerate(written):
        random = np.random.default_rng(1000 + number)
        other = "train_logprobs" if column == "logprobs" else "logprobs"
        for position in np.flatnonzero(random.random(30) < 0.9):
            one[column][position] = 0.0
            one[other][position] = float(-random.uniform(0, 0.02))
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert pair.verdict.kind != "broken"
    assert (pair.counts.missing_mu, pair.counts.missing_pi, pair.counts.num_tokens) == (0, 0, 1800)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(written), rel=1e-12)


def test_a_shifted_column_is_broken_data_and_no_mismatch(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["train_logprobs"] = [*one["train_logprobs"][1:], -1.0]
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT))
    assert (pair.verdict.kind, pair.verdict.code) == ("broken", "shifted")


def test_copies_among_what_is_analysed_are_left_out_though_the_whole_log_is_none(tmp_path: Path) -> None:
    """Of the prompts that would be analysed both columns are equal bit for bit; another prompt's differ."""
    written = rows()
    (tmp_path / "whole").mkdir()
    complete_run = imported(tmp_path / "whole", write(tmp_path / "whole.jsonl", written))
    names = read_table(complete_run.rollouts_path)["prompt_id"].to_pylist()
    analysed = chosen_prompts(dict.fromkeys(names, 60), lambda prompt_id: prompt_id, 300)
    computed = []
    for name, one in zip(names, written, strict=True):
        if name in analysed.prompt_ids:
            one["train_logprobs"] = one["logprobs"]
        else:
            computed.append(one)
    log = write(tmp_path / "log.jsonl", written)
    pair = pair_of(imported(tmp_path, log, "--max-tokens", 1000))
    assert (pair.counts.num_sequences, pair.counts.left_out_tokens) == (14, 300)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(computed), rel=1e-12)


def test_a_copy_that_was_rounded_to_fp32_on_the_way_is_one(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["train_logprobs"] = np.asarray(one["logprobs"], dtype=np.float32).astype(float).tolist()
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.INCONCLUSIVE)
    origin = run.read_manifest().log
    assert origin is not None
    assert [note.code for note in origin.notes if note.level == "missing"] == ["copied"]


@pytest.mark.parametrize("share", [3, 12])
def test_responses_whose_trainers_side_was_copied_are_left_out_and_counted(tmp_path: Path, share: int) -> None:
    written = rows()
    for one in written[::share]:
        one["train_logprobs"] = one["logprobs"]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    computed = [one for number, one in enumerate(written) if number % share]
    pair = pair_of(run)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(computed), rel=1e-12)
    assert (pair.counts.num_sequences, pair.counts.missing_pi) == (len(computed), 30 * len(written) // share)
    origin = run.read_manifest().log
    assert origin is not None
    (note,) = (one for one in origin.notes if one.level == "missing")
    assert (note.code, note.column, note.evidence["responses"]) == ("copied_rows", "log_pi", len(written) // share)
    assert origin.analysed_responses == len(written)


def test_responses_that_few_decimals_make_equal_are_no_copies(tmp_path: Path) -> None:
    """Most tokens are equal in the other responses too, and the rest are apart by one digit."""
    written = rows()
    for number, one in enumerate(written):
        one["logprobs"] = [round(value, 2) for value in one["logprobs"]]
        one["train_logprobs"] = list(one["logprobs"])
        if number % 3:
            one["train_logprobs"][number % 30] -= 0.01
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    assert pair_of(run).counts.num_sequences == len(written)


@pytest.mark.parametrize("value", [-100.0, -120.0])
def test_tokens_that_no_sampler_draws_are_left_out_of_every_number(tmp_path: Path, value: float) -> None:
    """Minus 100 itself is what some writers put where they have none."""
    written = rows()
    for one in written[:6]:
        one["logprobs"][3] = value
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert (pair.counts.missing_mu, pair.counts.left_out_tokens) == (6, 6)
    assert pair.metrics["abs_logprob_diff_max"].value < 1
    assert pair.verdict.kind != "bug"
