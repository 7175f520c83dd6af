"""`watch`: what cannot be judged is named, counted, and never a quiet pass."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.watch_outcome import absent_steps, short_steps
from tests.importing.logs import mean_abs, row, write
from tests.importing.watching import ENTROPIES, LIMIT, log_of, old, step_rows, watched


@pytest.mark.slow
def test_a_step_whose_trainers_side_was_not_computed_is_no_perfect_and_no_broken_step(
    folder: Path, guards: Path
) -> None:
    log_of(folder, [1.0, 1.0])
    write(folder / "step_2.jsonl", [one | {"train_logprobs": one["logprobs"]} for one in step_rows()])
    write(folder / "step_3.jsonl", [one | {"train_logprobs": [0.0] * 30} for one in step_rows()])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert [step.findings for step in record.steps] == [[], [], ["copied"], ["all_zero"]]
    assert [bool(step.metrics) for step in record.steps] == [True, True, False, False]
    assert answer.stderr.count("  not judged") == 2
    assert "inconclusive: 2 of 4 steps could not be judged, more than 10 %" in answer.stderr
    assert "; judged 2 of 4 steps; not judged: steps 2 to 3" in answer.stderr
    watched(folder, "--guards", guards, "--unjudged-share", 0.5, code=ExitCode.PASS)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["logprobs", "train_logprobs"])
def test_steps_that_cannot_be_judged_end_it_with_3_once_patience_is_over(
    folder: Path, guards: Path, column: str
) -> None:
    """The engine's log-probs are all 0, or a copy of the trainer's, from step 8 of 14."""
    log_of(folder, [1.0] * 14)
    for number in range(8, 14):
        lost = {"logprobs": [0.0] * 30} if column == "logprobs" else {}
        rows = [one | (lost or {"train_logprobs": one["logprobs"]}) for one in step_rows()]
        write(folder / f"step_{number}.jsonl", rows)
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert (record.num_judged, record.not_judged) == (8, [8, 9, 10])
    assert "inconclusive: 3 steps in a row could not be judged" in answer.stderr
    assert answer.stderr.endswith("; judged 8 of 11 steps; not judged: steps 8 to 10\n")
    _, record = watched(folder, "--guards", guards, "--unjudged", 0, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [8, 9, 10, 11, 12, 13]
    watched(folder, "--guards", guards, "--unjudged", 0, "--unjudged-share", 0.5, code=ExitCode.PASS)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["first", "scattered"])
def test_a_copy_with_a_few_other_tokens_is_no_perfect_step(folder: Path, guards: Path, kept: str) -> None:
    """Each response keeps its own first token, or one in twenty anywhere."""
    for number in range(3):
        rows = step_rows()
        for index, one in enumerate(rows):
            own = [0] if kept == "first" else [token for token in range(30) if (token + index) % 20 == 0]
            one["train_logprobs"] = [
                one["train_logprobs" if token in own else "logprobs"][token] for token in range(30)
            ]
        write(folder / f"step_{number}.jsonl", rows)
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert [step.findings for step in record.steps] == [["copied"]] * 3
    assert record.not_judged == [0, 1, 2]
    assert "bit for bit at 4" in answer.stderr
    assert "of 480 tokens below -0.01 (9" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize("digits", ["fp32", "bf16", "decimals"])
def test_sides_that_agree_but_for_their_last_digits_are_judged(folder: Path, guards: Path, digits: str) -> None:
    """Two computations in FP32 of a policy that is nearly sure; or of another one, rounded to BF16 or to decimals."""
    random = np.random.default_rng(0)
    for number in range(3):
        rows = step_rows()
        for one in rows:
            exact = np.asarray(one["logprobs"])
            is_sure = random.random(30) < (0.9 if digits == "fp32" else 0.0)
            exact = np.where(is_sure, exact / 1e3, exact)
            noise = 1e-6 if digits == "fp32" else 1e-4
            sides = (exact + random.normal(0, noise, 30) * -np.expm1(exact) for _ in range(2))
            one["logprobs"], one["train_logprobs"] = (written(side, digits) for side in sides)
        write(folder / f"step_{number}.jsonl", rows)
    old(folder)
    _, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert [step.findings for step in record.steps] == [[]] * 3


def written(side: np.ndarray, digits: str) -> list[float]:
    if digits == "decimals":
        return side.round(3).tolist()
    bits = side.astype(np.float32).view(np.uint32)
    if digits == "bf16":
        bits = (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).tolist()


@pytest.mark.slow
def test_one_step_of_many_that_cannot_be_judged_is_counted_and_passes(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0] * 14)
    write(folder / "step_9.jsonl", [one | {"logprobs": [0.0] * 30} for one in step_rows()])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert (record.num_judged, record.not_judged) == (13, [9])
    assert "pass: no guard fired, and KL (k3) was flat over 13 steps (4.39e-5), " in answer.stderr
    assert answer.stderr.endswith("; judged 13 of 14 steps; not judged: step 9\n")


def test_steps_that_a_guard_falls_silent_on_are_not_counted_as_judged(folder: Path) -> None:
    for number in range(6):
        write(folder / f"step_{number}.jsonl", step_rows(**({"entropy": ENTROPIES} if number < 2 else {})))
    old(folder)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert (record.num_judged, record.judged_in_part) == (2, [2, 3, 4])
    assert "3 steps in a row could not be judged" in answer.stderr
    assert "judged 2 of 5 steps; judged by some guards only: steps 2 to 4" in answer.stderr


def test_a_step_that_lacks_what_a_guard_reads_is_said_to_be_not_judged_by_it(folder: Path) -> None:
    write(folder / "step_0.jsonl", step_rows(entropy=ENTROPIES))
    write(folder / "step_1.jsonl", step_rows())
    old(folder)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert "temperature" not in record.guards_off
    assert "guards that read mismatch/temperature_fit" in answer.stderr


@pytest.mark.slow
def test_an_empty_and_a_cut_step_in_the_middle_are_named_and_counted(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0] * 8)
    empty, cut = folder / "step_3.jsonl", folder / "step_5.jsonl"
    empty.write_text("")
    cut.write_text(cut.read_text()[:100])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [3, 5]
    assert f"a file cannot be read and is left out: {empty}: it is empty" in answer.stderr
    assert f"a file cannot be read and is left out: {cut}: " in answer.stderr


def test_a_step_of_another_content_in_the_middle_is_named(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0] * 3)
    (folder / "step_1.jsonl").write_text('{"error": "out of memory"}\n')
    (folder / "settings.jsonl").write_text('{"steps": 3}\n')
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [1]
    assert "step_1.jsonl: it holds something other than" in answer.stderr
    assert "settings.jsonl" not in answer.stderr


@pytest.mark.parametrize("words", [(), ("--format", "plain")])
def test_a_folder_that_never_holds_a_log_ends_with_3(folder: Path, words: tuple[str, ...]) -> None:
    answer, record = watched(folder, *words, code=ExitCode.INCONCLUSIVE)
    assert record.steps == []
    assert "inconclusive: no step could be judged; judged 0 of 0 steps" in answer.stderr


def with_nulls(column: str, places: int) -> list[dict[str, Any]]:
    """A step of 480 tokens, so many of which, one a response, have no log-prob in a column."""
    rows = step_rows()
    for place in range(places):
        rows[place % 16][column][7 + place // 16] = None
    return rows


@pytest.mark.parametrize("column", ["logprobs", "train_logprobs"])
def test_a_few_tokens_without_a_log_prob_are_left_out_and_the_others_are_judged(
    folder: Path, guards: Path, column: str
) -> None:
    log_of(folder, [1.0, 1.0])
    write(folder / "step_2.jsonl", with_nulls(column, 3))
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert (record.num_judged, record.steps[2].left_out_tokens) == (3, 3)
    assert "  3 of 480 tokens (0.62 %, " in answer.stderr
    assert " lack a log-prob and are left out" in answer.stderr
    complete_metrics, part = (record.steps[step].metrics for step in (1, 2))
    assert part["mismatch/kl_k3"] == pytest.approx(complete_metrics["mismatch/kl_k3"], rel=0.1)
    of_whole = mean_abs(step_rows()[3:])
    assert part["mismatch/abs_logprob_diff_seq"] == pytest.approx(of_whole, rel=1e-6)


def test_a_mismatch_beside_missing_tokens_is_still_seen(folder: Path, guards: Path) -> None:
    for number, noise in enumerate([1.0, 1.0, 100.0, 100.0, 100.0, 100.0]):
        rows = step_rows(noise)
        rows[number]["logprobs"][3] = None
        write(folder / f"step_{number}.jsonl", rows)
    old(folder)
    _, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert record.stopped_at == 5


def test_a_step_that_lacks_more_tokens_than_a_twentieth_is_not_judged(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0, 1.0])
    write(folder / "step_2.jsonl", with_nulls("logprobs", 30))
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert (record.not_judged, record.steps[2].metrics) == ([2], {})
    assert "  not judged: 30 of 480 tokens (6.2 %, " in answer.stderr


def test_few_tokens_with_much_of_the_surprisal_are_not_left_out_in_silence(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0, 1.0])
    rows = step_rows()
    for one in rows:
        one["train_logprobs"][7], one["logprobs"][7] = -40.0, None
    write(folder / "step_2.jsonl", rows)
    old(folder)
    _, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [2]


def test_responses_without_the_trainers_column_count_as_missing_tokens(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0, 1.0])
    rows = step_rows()
    for one in rows[::2]:
        del one["train_logprobs"]
    write(folder / "step_2.jsonl", rows)
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [2]
    assert "not judged: 240 of 480 tokens (50 %, " in answer.stderr


def test_a_log_prob_of_minus_infinity_is_a_fault_and_not_missing(folder: Path) -> None:
    log_of(folder, [1.0, 1.0])
    broken = step_rows()
    broken[3]["train_logprobs"][7] = -math.inf
    write(folder / "step_2.jsonl", broken)
    old(folder)
    _, record = watched(folder, code=ExitCode.ENVIRONMENT)
    assert "mismatch-nonfinite" in [event["guard"] for event in record.steps[2].events]
    assert record.steps[2].metrics["mismatch/kl_k3"] == "nan"


def test_one_step_is_too_few_where_guards_wait_for_two(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0]))
    answer, _ = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert answer.stderr.endswith(
        "inconclusive: too few to pass: guards that are on wait for 2 broken steps in a row; judged 1 of 1 step\n"
    )
    guards.write_text(LIMIT.replace("patience = 2", "patience = 1"))
    answer, _ = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert answer.stderr.endswith("pass: no guard fired; judged 1 of 1 step\n")


def test_a_step_of_a_few_tokens_is_not_judged(folder: Path, guards: Path) -> None:
    short = row(0)
    for name in ("token_ids", "logprobs", "train_logprobs"):
        short[name] = short[name][:15]
    for number in range(3):
        write(folder / f"step_{number}.jsonl", [short])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [0, 1, 2]
    assert "not judged: 15 tokens with log-probs of both sides, where 16 are the fewest" in answer.stderr


@pytest.mark.slow
def test_a_step_number_that_is_left_out_is_named(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0] * 14)
    (folder / "step_7.jsonl").unlink()
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert record.absent == [7]
    assert answer.stderr.endswith("; judged 13 of 14 steps; absent from the log: step 7\n")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 13])
def test_a_step_that_was_cut_off_at_the_end_of_a_line_is_noted(folder: Path, guards: Path, cut: int) -> None:
    log_of(folder, [1.0] * 14)
    write(folder / f"step_{cut}.jsonl", step_rows()[:13])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert record.short == [cut]
    assert f"\nstep {cut}: fewer responses than the other steps have, as where a file was cut off" in answer.stderr
    assert answer.stderr.count("  note: fewer responses") == (cut > 2)


@pytest.mark.slow
def test_steps_of_one_size_are_not_noted(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0] * 6))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert record.short == []
    assert "fewer responses" not in answer.stderr


@pytest.mark.parametrize(
    ("counts", "short"),
    [
        ([], []),
        ([128, 128, 20], []),
        ([128, 128, 128, 127], [3]),
        ([100, 128, 90, 120, 110], []),
        ([100, 128, 40, 120, 110], [2]),
        ([128] * 20 + [64, 5], [20, 21]),
        ([128, 64] * 10, []),
    ],
)
def test_short_steps_have_far_fewer_responses_or_fewer_than_all_others(counts: list[int], short: list[int]) -> None:
    assert short_steps(dict(enumerate(counts))) == short


@pytest.mark.parametrize(
    ("numbers", "absent"),
    [([], []), ([5], []), ([4, 9], []), ([0, 10, 20, 40], [30]), ([1, 2, 3, 7], [4, 5, 6]), ([3, 1, 2], [])],
)
def test_absent_steps_are_those_of_the_usual_stride(numbers: list[int], absent: list[int]) -> None:
    assert absent_steps(numbers) == absent


def test_a_step_whose_numbers_cannot_be_is_not_passed_over(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0, 1.0])
    write(folder / "step_2.jsonl", [one | {"train_logprobs": [0.5] * 29 + [0.6]} for one in step_rows()])
    old(folder)
    _, record = watched(folder, "--guards", guards, code=ExitCode.ENVIRONMENT)
    assert "wrong_sign" in record.steps[2].findings


def test_a_log_with_nothing_to_judge_is_inconclusive(folder: Path) -> None:
    write(folder / "step_0.jsonl", step_rows(with_pi=True))
    write(
        folder / "step_0.jsonl", [{name: one[name] for name in one if name != "train_logprobs"} for one in step_rows()]
    )
    old(folder)
    _, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert record.num_judged == 0
