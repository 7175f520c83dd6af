"""`watch`: a log that grows is read step by step, each of them once and whole."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.following import Follower
from mismatch_probe.logs import recognise
from mismatch_probe.records.lines import WatchRecord
from tests.command_line import probe
from tests.halts import wait_until
from tests.importing.logs import row, write
from tests.importing.watching import log_of, old, step_rows, watched


def once_said(words: str) -> None:
    """Wait until the watch of this process has said it."""
    wait_until(lambda: words in getattr(sys.stderr, "getvalue", str)(), f"the watch says {words!r}")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Its failure is the test's."""
    with ThreadPoolExecutor(1) as other:
        acting = other.submit(act)
        yield
        acting.result()


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


def test_the_steps_of_one_file_come_as_a_row_of_the_next_step_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [*step_rows(step=0), *step_rows(step=1)])
    follower = Follower(recognise(path), path)
    assert [(step.number, len(step.responses)) for step in follower.new_steps()] == [(0, 16)]
    assert list(follower.unfinished) == [1]
    _append(path, [*step_rows(step=1), *step_rows(step=2)])
    follower._resting_until = 0.0
    assert [(step.number, len(step.responses)) for step in follower.new_steps()] == [(1, 32)]
    os.utime(path, (time.time() - 3600,) * 2)
    follower._resting_until = 0.0
    assert [step.number for step in follower.new_steps()] == [2]
    assert not follower.unfinished
    _append(path, step_rows(step=0))
    follower._resting_until = 0.0
    assert not list(follower.new_steps())
    assert list(follower.rewritten) == [0]


def test_a_file_of_all_steps_rests_before_it_is_read_again(tmp_path: Path) -> None:
    """It is read from its start each time."""
    path = write(tmp_path / "all.jsonl", step_rows(step=0))
    follower = Follower(recognise(path), path)
    assert not list(follower.new_steps())
    follower._resting_until = time.monotonic() + 3600
    _append(path, step_rows(step=1))
    assert not list(follower.new_steps())
    assert follower.has_unread_rows


def test_a_cut_off_last_row_of_a_file_of_all_steps_is_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [*step_rows(step=0), *step_rows(step=1)])
    complete = path.read_bytes()
    path.write_bytes(complete[:-100])
    os.utime(path, (time.time() - 3600,) * 2)
    follower = Follower(recognise(path), path)
    assert [step.number for step in follower.new_steps()] == [0]
    assert list(follower.unfinished) == [1]


def _append(path: Path, more: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in more)


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
    complete_bytes = newest.read_bytes()
    newest.write_bytes(complete_bytes[:-100])
    old(folder)
    follower = Follower(recognise(folder), folder)
    assert [step.number for step in follower.new_steps()] == [0]
    assert list(follower.unfinished) == [1]
    _, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert ([one.step for one in record.steps], record.unfinished) == ([0], [1])
    newest.write_bytes(complete_bytes)
    write(folder / "step_2.jsonl", step_rows())
    assert [len(step.responses) for step in follower.new_steps()] == [16]


def test_a_step_that_was_never_declared_finished_is_named_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports"
    for number, stable in enumerate((True, False, True)):
        _prime_rl(folder / f"step_{number}", stable=stable)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert ([one.step for one in record.steps], record.unfinished) == ([0, 2], [1])
    assert "step 1 is not complete and was not judged: its system has not declared" in answer.stderr
    assert "judged 2 of 3 steps; not complete: step 1" in answer.stderr


def test_a_folder_that_can_no_longer_be_looked_through_is_no_quiet_end(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    follower = Follower(recognise(folder), folder)
    assert len(list(follower.new_steps())) == 2
    (folder / "latest").symlink_to(folder / "step_1.jsonl")
    assert not list(follower.new_steps())
    assert follower.trouble is not None
    assert "latest is a link" in follower.trouble


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert answer.returncode == ExitCode.PASS, answer
    assert [step.step for step in WatchRecord.model_validate_json(answer.stdout).steps] == [0, 1]


@pytest.mark.slow
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
