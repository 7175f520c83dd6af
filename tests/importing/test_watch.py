"""`watch`: each step of a growing log is judged once, by the guards of `train`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.following import Follower
from mismatch_probe.logs import recognise
from mismatch_probe.records.watch import WatchRecord
from tests.command_line import Answer, probe
from tests.importing.logs import mean_abs, row, write

ENTROPIES = np.random.default_rng(0).uniform(0.5, 2, 30).tolist()
LIMIT = """
defaults = false
[[guard]]
name = "mismatch"
metric = "mismatch/abs_logprob_diff"
rule = "limit"
above = 0.1
patience = 2
actions = ["warn", "stop"]
"""


def step_rows(noise: float = 1.0, **others: Any) -> list[dict[str, Any]]:
    """Responses of one step; the trainer's side is off by as many times the usual noise."""
    found = [row(number, **others) for number in range(16)]
    for one in found:
        deviation = np.subtract(one["train_logprobs"], one["logprobs"])
        if noise != 1:
            one["train_logprobs"] = (np.asarray(one["logprobs"]) - noise * np.abs(deviation)).tolist()
    return found


def log_of(folder: Path, noises: list[float]) -> Path:
    for number, noise in enumerate(noises):
        write(folder / f"step_{number}.jsonl", step_rows(noise))
    return folder


def watched(folder: Path, *words: object, code: ExitCode) -> tuple[Answer, WatchRecord]:
    answer = probe("watch", folder, "--idle", 0, "--json", *words)
    assert answer.returncode == code, answer.stderr
    return answer, WatchRecord.model_validate_json(answer.stdout)


@pytest.fixture
def guards(tmp_path: Path) -> Path:
    path = tmp_path / "guards.toml"
    path.write_text(LIMIT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.mkdir()
    return path


def old(folder: Path) -> None:
    """As if nothing had been written for an hour."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)


def once_said(words: str) -> None:
    """Wait until the watch of this process has said it."""
    for _ in range(6000):
        if words in getattr(sys.stderr, "getvalue", str)():
            return
        time.sleep(0.01)
    raise AssertionError(f"the watch never said {words!r}")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Its failure is the test's."""
    with ThreadPoolExecutor(1) as other:
        acting = other.submit(act)
        yield
        acting.result()


def test_a_steady_log_is_judged_step_by_step_and_passes(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0] * 5))
    _, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert [step.step for step in record.steps] == [0, 1, 2, 3, 4]
    assert record.steps[0].metrics["mismatch/abs_logprob_diff"] == pytest.approx(mean_abs(step_rows()), rel=1e-12)
    assert record.stopped_at is None


def test_a_guard_that_asks_to_stop_ends_it_with_1_at_the_step_that_broke_it(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert record.stopped_at == 5
    assert [event["actions"] for step in record.steps for event in step.events] == [["warn"], ["stop"]]
    assert "asks to stop at step 5" in answer.stderr


def test_guards_that_the_log_cannot_serve_are_off_and_counted_in_one_line(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    answer, record = watched(folder, code=ExitCode.PASS)
    assert record.guards_off["temperature"] == ["mismatch/temperature_fit"]
    assert "mismatch-limit" not in record.guards_off
    [counted] = [line for line in answer.stderr.splitlines() if "guards judge this log" in line]
    on, of = (int(word) for word in counted.split()[:3] if word.isdigit())
    assert of - on == len(record.guards_off) > 10
    by_what = [int(number) for number in re.findall(r"\((\d+)\)", counted)]
    assert sum(by_what) == len(record.guards_off)
    assert "entropies (2)" in counted


def test_no_guard_is_counted_where_the_log_serves_all(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0]))
    answer, _ = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert "guards judge this log" not in answer.stderr


def test_with_entropies_in_the_log_more_guards_are_on(folder: Path) -> None:
    write(folder / "step_0.jsonl", step_rows(entropy=ENTROPIES))
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert "temperature" not in record.guards_off


def test_copies_among_the_responses_of_a_step_make_it_no_better(folder: Path, guards: Path) -> None:
    steps = step_rows()
    copied = [one | {"train_logprobs": one["logprobs"]} for one in steps[::2]]
    write(folder / "step_0.jsonl", [*copied, *steps[1::2]])
    old(folder)
    _, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    (step,) = record.steps
    assert step.metrics["mismatch/abs_logprob_diff"] == pytest.approx(mean_abs(steps[1::2]), rel=1e-12)
    assert step.findings == ["copied_rows"]


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
    assert "2 of 4 steps were judged; not judged: steps 2 to 3: 2 of 4 steps could not be judged" in answer.stderr
    watched(folder, "--guards", guards, "--unjudged-share", 0.5, code=ExitCode.PASS)


@pytest.mark.parametrize("column", ["logprobs", "train_logprobs"])
def test_steps_that_cannot_be_judged_end_it_with_3_once_patience_is_over(
    folder: Path, guards: Path, column: str
) -> None:
    """The sampler's log-probs are all 0, or a copy of the trainer's, from step 8 of 14."""
    log_of(folder, [1.0] * 14)
    for number in range(8, 14):
        lost = {"logprobs": [0.0] * 30} if column == "logprobs" else {}
        rows = [one | (lost or {"train_logprobs": one["logprobs"]}) for one in step_rows()]
        write(folder / f"step_{number}.jsonl", rows)
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert (record.num_judged, record.not_judged) == (8, [8, 9, 10])
    assert "8 of 11 steps were judged; not judged: steps 8 to 10: 3 steps in a row" in answer.stderr
    _, record = watched(folder, "--guards", guards, "--unjudged", 0, code=ExitCode.INCONCLUSIVE)
    assert record.not_judged == [8, 9, 10, 11, 12, 13]
    watched(folder, "--guards", guards, "--unjudged", 0, "--unjudged-share", 0.5, code=ExitCode.PASS)


def test_one_step_of_many_that_cannot_be_judged_is_counted_and_passes(folder: Path, guards: Path) -> None:
    log_of(folder, [1.0] * 14)
    write(folder / "step_9.jsonl", [one | {"logprobs": [0.0] * 30} for one in step_rows()])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert (record.num_judged, record.not_judged) == (13, [9])
    assert "13 of 14 steps were judged; not judged: step 9: no guard asked" in answer.stderr


def test_a_guard_that_asks_for_a_rollback_is_no_pass(folder: Path, guards: Path) -> None:
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["rollback", "warn"]'))
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 1.0, 1.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert len(record.steps) == 6
    assert record.stopped_at is None
    assert "6 of 6 steps were judged: guards asked for more than a warning: rollback at step 3 (mismatch)" in (
        answer.stderr
    )


def test_a_guard_that_only_warns_is_a_pass(folder: Path, guards: Path) -> None:
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["warn"]'))
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 1.0, 1.0]))
    _, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert [step.step for step in record.steps if step.events] == [3]


def test_steps_that_a_guard_falls_silent_on_are_not_counted_as_judged(folder: Path) -> None:
    for number in range(6):
        write(folder / f"step_{number}.jsonl", step_rows(**({"entropy": ENTROPIES} if number < 2 else {})))
    old(folder)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert (record.num_judged, record.judged_in_part) == (2, [2, 3, 4])
    assert "judged by some guards only: steps 2 to 4: 3 steps in a row could not be judged" in answer.stderr


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


def test_an_empty_newest_step_is_waited_for(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    (folder / "step_2.jsonl").touch()
    old(folder)
    follower = Follower(recognise(folder), folder)
    assert [step.number for step in follower.new_steps()] == [0, 1]
    assert list(follower.unfinished) == [2]
    write(folder / "step_2.jsonl", step_rows())
    write(folder / "step_3.jsonl", step_rows())
    assert [step.number for step in follower.new_steps()] == [2]


def test_a_step_that_goes_away_before_it_was_read_is_named(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    write(folder / "step_2.jsonl", step_rows())
    follower = Follower(recognise(folder), folder)
    assert [step.number for step in follower.new_steps()] == [0, 1]
    (folder / "step_2.jsonl").unlink()
    assert not list(follower.new_steps())
    assert follower.vanished == [2]


def test_late_rows_of_a_step_are_named_with_their_bytes(folder: Path) -> None:
    log_of(folder, [1.0, 1.0])
    first = folder / "step_0.jsonl"
    os.utime(first, (time.time() - 3600,) * 2)
    follower = Follower(recognise(folder), folder)
    assert next(iter(follower.new_steps())).number == 0
    before = first.stat().st_size
    with first.open("a") as file:
        file.write(json.dumps(row(99)) + "\n")
    list(follower.new_steps())
    assert follower.rewritten == {0: first.stat().st_size - before}


@pytest.mark.parametrize("words", [(), ("--format", "plain")])
def test_a_folder_that_never_holds_a_log_ends_with_3(folder: Path, words: tuple[str, ...]) -> None:
    answer, record = watched(folder, *words, code=ExitCode.INCONCLUSIVE)
    assert record.steps == []
    assert "0 of 0 steps were judged: no step could be judged" in answer.stderr


@pytest.mark.parametrize("words", [(), ("--format", "plain")])
def test_a_folder_that_does_not_exist_ends_with_2(folder: Path, words: tuple[str, ...]) -> None:
    answer = probe("watch", folder / "none", "--every", 0.1, *words, code=ExitCode.USAGE)
    assert "does not exist" in answer.stderr


def test_log_probs_that_are_missing_fire_the_guard_on_what_is_no_number(folder: Path) -> None:
    log_of(folder, [1.0, 1.0])
    broken = step_rows()
    broken[3]["logprobs"][7] = None
    write(folder / "step_2.jsonl", broken)
    old(folder)
    _, record = watched(folder, code=ExitCode.ENVIRONMENT)
    assert "mismatch-nonfinite" in [event["guard"] for event in record.steps[2].events]
    assert record.steps[2].metrics["mismatch/kl_k3"] == "nan"


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
    watched(folder, code=ExitCode.INCONCLUSIVE)


def test_the_newest_step_waits_until_its_file_has_settled(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    write(folder / "step_2.jsonl", step_rows())
    follower = Follower(recognise(folder), folder, settled_seconds=3600 * 24)
    assert [step.number for step in follower.new_steps()] == [0, 1]
    write(folder / "step_3.jsonl", step_rows())
    assert [step.number for step in follower.new_steps()] == [2]


def test_a_step_that_its_system_has_not_declared_finished_waits(tmp_path: Path) -> None:
    """prime-rl writes STABLE once every rank has written."""
    folder = tmp_path / "token_exports"
    _prime_rl(folder / "step_0", stable=True)
    _prime_rl(folder / "step_1", stable=False)
    follower = Follower(recognise(folder), folder, settled_seconds=0)
    assert [step.number for step in follower.new_steps()] == [0]
    (folder / "step_1" / "STABLE").touch()
    assert [step.number for step in follower.new_steps()] == [1]
    assert not list(follower.new_steps())


def test_a_step_that_is_written_again_is_named_and_not_judged_twice(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    follower = Follower(recognise(folder), folder)
    assert [step.number for step in follower.new_steps()] == [0, 1]
    write(folder / "step_1.jsonl", step_rows(2.0))
    assert not list(follower.new_steps())
    assert list(follower.rewritten) == [1]


def test_a_newest_step_whose_last_line_is_cut_off_waits_for_the_rest(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    newest = folder / "step_1.jsonl"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-100])
    old(folder)
    follower = Follower(recognise(folder), folder)
    assert [step.number for step in follower.new_steps()] == [0]
    assert list(follower.unfinished) == [1]
    _, record = watched(folder, code=ExitCode.PASS)
    assert ([one.step for one in record.steps], record.unfinished) == ([0], [1])
    newest.write_bytes(whole)
    write(folder / "step_2.jsonl", step_rows())
    assert [len(step.responses) for step in follower.new_steps()] == [16]


def test_a_step_that_was_never_declared_finished_is_named_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports"
    for number, stable in enumerate((True, False, True)):
        _prime_rl(folder / f"step_{number}", stable=stable)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert ([one.step for one in record.steps], record.unfinished) == ([0, 2], [1])
    assert "step 1 is not whole and was not judged: its system has not declared" in answer.stderr
    assert "2 of 3 steps were judged; not whole: step 1" in answer.stderr


def test_a_folder_that_can_no_longer_be_looked_through_is_no_quiet_end(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    follower = Follower(recognise(folder), folder)
    assert len(list(follower.new_steps())) == 2
    (folder / "latest").symlink_to(folder / "step_1.jsonl")
    assert not list(follower.new_steps())
    assert follower.trouble is not None
    assert "latest is a link" in follower.trouble


def test_a_link_that_comes_while_it_watches_ends_it_with_the_reason(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))

    def train() -> None:
        once_said("step 1:")
        (folder / "latest").symlink_to(folder / "step_1.jsonl")

    with meanwhile(train):
        answer = probe("watch", folder, "--every", 0.1, "--idle", 1, "--json")
    assert answer.returncode == ExitCode.USAGE
    assert len(WatchRecord.model_validate_json(answer.stdout).steps) == 2
    assert "latest is a link" in answer.stderr


def test_a_file_with_other_steps_than_its_name_says_is_not_judged_as_one(folder: Path) -> None:
    write(folder / "part-00000.jsonl", [*step_rows(step=5), *step_rows(50.0, step=6)])
    old(folder)
    answer = probe("watch", folder, "--idle", 0, code=ExitCode.USAGE)
    assert "is of step 5 in a file of step 0" in answer.stderr


def test_a_log_that_is_begun_after_the_watch_is_waited_for(folder: Path, guards: Path) -> None:
    (folder / "settings.yaml").write_text("steps: 3\n")
    (folder / "step_0.jsonl").write_text(json.dumps(row(0))[:40])

    def train() -> None:
        once_said("waiting:")
        for number in range(2):
            path = write(folder / f".step_{number}", step_rows())
            os.utime(path, (time.time() - 3600,) * 2)
            path.rename(folder / f"step_{number}.jsonl")

    with meanwhile(train):
        answer = probe("watch", folder, "--guards", guards, "--every", 0.1, "--idle", 1, "--json")
    assert answer.returncode == ExitCode.PASS, answer.stderr
    assert [step.step for step in WatchRecord.model_validate_json(answer.stdout).steps] == [0, 1]


def test_entropies_that_were_not_recorded_turn_no_guard_on(folder: Path) -> None:
    write(folder / "step_0.jsonl", step_rows(entropy=[0.0] * 30))
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert "temperature" in record.guards_off
    assert "policy/entropy" not in record.steps[0].metrics


def test_a_step_that_lacks_what_a_guard_reads_is_said_to_be_not_judged_by_it(folder: Path) -> None:
    write(folder / "step_0.jsonl", step_rows(entropy=ENTROPIES))
    write(folder / "step_1.jsonl", step_rows())
    old(folder)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert "temperature" not in record.guards_off
    assert "guards that read mismatch/temperature_fit" in answer.stderr


def test_steps_that_come_while_it_watches_are_judged_as_they_come(folder: Path, guards: Path) -> None:
    write(folder / "step_0.jsonl", step_rows())

    def train() -> None:
        for number in range(1, 8):
            if number > 1:
                once_said(f"step {number - 2}:")
            unfinished = write(folder / f".step_{number}", step_rows(1.0 if number < 3 else 100.0))
            unfinished.rename(folder / f"step_{number}.jsonl")

    with meanwhile(train):
        answer = probe("watch", folder, "--guards", guards, "--every", 0.1, "--idle", 60, "--json")
    assert answer.returncode == ExitCode.GATE_FAILED
    assert WatchRecord.model_validate_json(answer.stdout).stopped_at == 6


def _prime_rl(folder: Path, *, stable: bool) -> None:
    folder.mkdir(parents=True)
    rows = []
    for number in range(8):
        one = row(number)
        length = len(one["token_ids"])
        rows.append(
            {
                "schema_version": 1,
                "step": int(folder.name.removeprefix("step_")),
                "rank": 0,
                "micro_step": 0,
                "micro_sequence_idx": number,
                "export_sequence_idx": number,
                "env_name": "sums",
                "token_ids": [*one["prompt_token_ids"], *one["token_ids"]],
                "position_ids": list(range(length + 3)),
                "loss_mask": [False] * 3 + [True] * length,
                "inference_logprobs": [0.0] * 3 + one["logprobs"],
                "trainer_logprobs": [-1.0] * 3 + one["train_logprobs"],
            }
        )
    (folder / "rank_0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if stable:
        (folder / "STABLE").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_judged_is_on_stdout_when_it_is_interrupted(
    folder: Path, guards: Path, number: int, code: ExitCode
) -> None:
    old(log_of(folder, [1.0, 1.0]))
    words = ["watch", str(folder), "--guards", str(guards), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1:"):
            break
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    record = WatchRecord.model_validate_json(out)
    assert [step.step for step in record.steps] == [0, 1]
    assert record.stopped_at is None
