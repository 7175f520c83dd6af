"""Columns that hold no log-probs of their tokens: missing, copied, not computed, shifted, of the wrong sign."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.selection import chosen_prompts
from mismatch_probe.records.tables import read_table
from tests.importing.imported import imported, pair_of
from tests.importing.logs import mean_abs, row, rows, write


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
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT))
    assert (pair.counts.missing_mu, pair.counts.missing_pi) == (1, 1)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(written[2:]), rel=1e-12)


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


def test_zeros_that_stand_for_missing_numbers_are_called_missing(tmp_path: Path) -> None:
    written = rows()
    for number in range(0, len(written), 3):
        written[number]["logprobs"][5] = 0.0
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT))
    assert pair.verdict.code == "missing_logprobs"
    assert pair.counts.missing_mu == 8


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
    whole = imported(tmp_path / "whole", write(tmp_path / "whole.jsonl", written))
    names = read_table(whole.rollouts_path)["prompt_id"].to_pylist()
    analysed = chosen_prompts(dict.fromkeys(names, 60), lambda prompt_id: prompt_id, 300)
    computed = []
    for name, one in zip(names, written, strict=True):
        if name in analysed.prompt_ids:
            one["train_logprobs"] = one["logprobs"]
        else:
            computed.append(one)
    log = write(tmp_path / "log.jsonl", written)
    pair = pair_of(imported(tmp_path, log, "--max-tokens", 1000))
    assert (pair.counts.num_sequences, pair.counts.num_prompts) == (14, 7)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(computed), rel=1e-12)


def test_a_copy_that_was_rounded_to_fp32_on_the_way_is_one(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["train_logprobs"] = np.asarray(one["logprobs"], dtype=np.float32).astype(float).tolist()
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.INCONCLUSIVE)
    origin = run.read_manifest().log
    assert origin is not None
    assert [note.code for note in origin.notes if note.level == "missing"] == ["copied"]


@pytest.mark.parametrize("share", [2, 12])
def test_responses_whose_trainers_side_was_copied_are_left_out_and_counted(tmp_path: Path, share: int) -> None:
    written = rows()
    for one in written[::share]:
        one["train_logprobs"] = one["logprobs"]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    computed = [one for number, one in enumerate(written) if number % share]
    assert pair_of(run).metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(computed), rel=1e-12)
    origin = run.read_manifest().log
    assert origin is not None
    (note,) = (one for one in origin.notes if one.level == "missing")
    assert (note.code, note.column, note.evidence["responses"]) == ("copied_rows", "log_pi", len(written) // share)
    assert origin.analysed_responses == len(computed)


def test_responses_that_few_decimals_make_equal_are_no_copies(tmp_path: Path) -> None:
    """Most tokens are equal in the other responses too."""
    written = rows()
    for number, one in enumerate(written):
        one["train_logprobs"] = list(one["logprobs"])
        if number % 3:
            one["train_logprobs"][number % 30] -= 0.01
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    assert pair_of(run).counts.num_sequences == len(written)
