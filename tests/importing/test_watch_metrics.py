"""`watch` follows metrics alone: files of each trainer's own writer, as they grow, with a collapse and without one."""

import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.importing.following import MetricFollower, MetricStep
from mismatch_probe.importing.metrics import MetricWatch, names_to_follow
from mismatch_probe.importing.watching import JudgedStep
from mismatch_probe.logs.metric_files import read_metric_log
from mismatch_probe.records.lines import WatchRecord
from tests.command_line import probe
from tests.importing.watching import Watching, watch_beside, watched

DATA = Path(__file__).parents[1] / "logs" / "metric_data"
NAMES = names_to_follow(DEFAULT_GUARDS)
OFTEN = ("--every", 0.1)
_NUMBER = r"[\d.]+(?:e-?\d+)?"


def scaled(words: str, factor: Callable[[int], float]) -> Callable[[str], str]:
    """Changes a text: the number behind `words`, a pattern, is multiplied at its n-th place by factor(n)."""

    def change(text: str) -> str:
        places = iter(range(len(text)))
        return re.sub(
            rf"({words})({_NUMBER})", lambda match: f"{match[1]}{float(match[2]) * factor(next(places)):.4f}", text
        )

    return change


def up_to(line: str) -> Callable[[str], str]:
    return lambda text: text[: text.index(line)]


def as_it_is(text: str) -> str:
    return text


CLEAN = {
    "verl.jsonl": up_to('{"step":11,'),
    "slime.log": as_it_is,
    "skyrl.log": as_it_is,
    "prime_rl.log": as_it_is,
    "prime_rl.jsonl": as_it_is,
    "nemo_rl.log": scaled("Generation KL Error: ", lambda place: 0.001 / (0.001 * 1.18**place)),
}
COLLAPSED = {
    "verl.log": as_it_is,
    "verl.jsonl": as_it_is,
    "wandb_chart.csv": as_it_is,
    "nemo_rl.log": as_it_is,
    "slime.log": scaled("'train/train_rollout_logprob_abs_diff': ", lambda place: 1 if place < 20 else 8),
    "skyrl.log": scaled("diff_(?:max|mean|std)': '", lambda place: 1 if place < 60 else 10),
    "prime_rl.log": scaled("Mismatch KL ", lambda place: 1 if place < 20 else 40),
    "prime_rl.jsonl": scaled('"mismatch_kl/all/mean": ?', lambda place: 1 if place < 20 else 40),
}


def changed(name: str, change: Callable[[str], str]) -> bytes:
    return change((DATA / name).read_text()).encode()


class Growing:
    """A file that grows, and the steps that a follower gave up to now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.follower = MetricFollower(path, NAMES)
        self.steps: list[MetricStep] = []

    def read(self) -> list[int]:
        """The numbers of the new steps."""
        self.follower._resting_until = 0.0
        new = list(self.follower.new_steps())
        self.steps += new
        return [step.number for step in new]

    def append(self, content: bytes) -> list[int]:
        with self.path.open("ab") as file:
            file.write(content)
        return self.read()

    def settle(self) -> list[int]:
        os.utime(self.path, (time.time() - 3600,) * 2)
        return self.read()

    def judged(self) -> list[JudgedStep]:
        watch = MetricWatch(DEFAULT_GUARDS, self.path)
        return [watch.judge(step) for step in self.steps]


def line(step: int, **values: float) -> bytes:
    return json.dumps({"step": step, **{name.replace("__", "/"): value for name, value in values.items()}}).encode()


@pytest.mark.parametrize(
    "name", ["verl.jsonl", "verl.log", "slime.log", "skyrl.log", "prime_rl.log", "nemo_rl.log", "nemo_rl.tfevents"]
)
def test_a_file_that_grows_by_odd_pieces_gives_each_step_once_with_its_whole_numbers(tmp_path: Path, name: str) -> None:
    content = (DATA / name).read_bytes()
    growing = Growing(tmp_path / name)
    for start in range(0, len(content), 997):
        growing.append(content[start : start + 997])
    growing.settle()
    log = read_metric_log(DATA / name, names=NAMES)
    steps = sorted(set().union(*log.series.values()))
    assert [step.number for step in growing.steps] == steps
    assert {step.number: step.values for step in growing.steps} == {
        step: {metric: values[step] for metric, values in log.series.items() if step in values} for step in steps
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLAPSED)
def test_a_collapse_in_a_file_that_grows_is_caught_while_it_grows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()

    def write_by_halves() -> None:
        for piece in changed(name, COLLAPSED[name]).splitlines(keepends=True):
            with path.open("ab") as file:
                file.write(piece[: len(piece) // 2])
                file.flush()
                time.sleep(0.002)
                file.write(piece[len(piece) // 2 :])

    writer = Thread(target=write_by_halves)
    writer.start()
    ended, record = watched(path, "--every", 0.1, "--idle", 300, code=ExitCode.GATE_FAILED)
    writer.join()
    assert record.stopped_at is not None
    assert {event["guard"] for step in record.steps for event in step.events} >= {"mismatch-limit"}
    assert f"A guard asks to stop at step {record.stopped_at}." in ended.stderr


@pytest.fixture(scope="module")
def watches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watching]]:
    """A watch of each clean file, while all of them grow: each ends seven seconds after its last step. The last tests
    of this file ask how, and the first one with a wait of its own begins them, so that they wait beside it.
    """
    folder = tmp_path_factory.mktemp("clean")
    rests = {folder / name: changed(name, change) for name, change in CLEAN.items()}
    with ExitStack() as stack:
        watches = {}
        for path, content in rests.items():
            path.write_bytes(content[:100])
            watches[path.name] = stack.enter_context(watch_beside(path, *OFTEN, "--idle", 7))
        for start in range(100, max(map(len, rests.values())), 1500):
            for path, content in rests.items():
                with path.open("ab") as file:
                    file.write(content[start : start + 1500])
            time.sleep(0.1)
        yield watches


JSON = line(0, rollout_corr__k3_kl=0.001) + b"\n"
HEADER = b'"Step","run - rollout_corr/k3_kl"\r\n'
HALF_WRITTEN = {
    "JSON": (JSON[:25], JSON[25:] + line(1, rollout_corr__k3_kl=0.001) + b"\n", "malformed JSON"),
    "half a header": (HEADER[:12], HEADER[12:] + b"0,0.001\r\n1,0.001\r\n", "neither JSON objects"),
    "header": (HEADER, b"0,0.001\r\n1,0.001\r\n", "neither JSON objects"),
    "half a row with an unknown column": (
        b"step,foo,rollout_corr/k3_kl\n0,1.0,",
        b"0.001\n1,1.0,0.001\n",
        "neither JSON objects",
    ),
    "half a row": (HEADER + b"0", b",0.001\r\n1,0.001\r\n", "neither JSON objects"),
}
"""What is there at first, what comes after it, and why it is waited for."""


@pytest.mark.slow
@pytest.mark.usefixtures("watches")
def test_a_first_step_that_is_half_written_is_waited_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        watching = {}
        for name, (start, _, _) in HALF_WRITTEN.items():
            (tmp_path / name).write_bytes(start)
            watching[name] = stack.enter_context(watch_beside(tmp_path / name, *OFTEN, "--idle", 4))
        for name, (_, rest, reason) in HALF_WRITTEN.items():
            assert reason in watching[name].wait_for("waiting: ")
            with (tmp_path / name).open("ab") as file:
                file.write(rest)
        for name, watch in watching.items():
            answer = watch.end()
            steps = [step.step for step in WatchRecord.model_validate_json(answer.stdout).steps]
            assert steps[:1] == [0], (name, answer.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (JSON[:25] + b"\n" + line(1, rollout_corr__k3_kl=0.001) + b"\n", "malformed JSON"),
        (HEADER + b"0,\r\n1,", "neither JSON objects"),
    ],
    ids=["JSON", "CSV"],
)
def test_a_first_step_that_is_broken_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """A whole line of a step is there, so nobody is writing it any more."""
    path = tmp_path / "metrics"
    path.write_bytes(content)
    answer = probe("watch", path, *OFTEN, "--idle", 30, "--json", code=ExitCode.USAGE)
    assert reason in answer.stderr


@pytest.mark.slow
def test_a_watch_that_was_interrupted_judges_alike_when_it_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes((DATA / "prime_rl.log").read_bytes())
    with watch_beside(path, *OFTEN) as watch:
        watch.wait_for("step 39:")
        os.kill(watch.process.pid, signal.SIGINT)
        answer = watch.end()
    assert answer.returncode == 130
    record = WatchRecord.model_validate_json(answer.stdout)
    os.utime(path, (time.time() - 3600,) * 2)
    _, again = watched(path, code=ExitCode.PASS)
    assert again.steps[: len(record.steps)] == record.steps
    assert len(again.steps) == 40


def test_a_folder_of_event_files_is_followed_across_a_restart(tmp_path: Path) -> None:
    """After a restart TensorBoard writes a second file."""
    content = (DATA / "tensorboardx.tfevents").read_bytes()
    (tmp_path / "events.out.tfevents.1").write_bytes(content[: len(content) // 2])
    follower = MetricFollower(tmp_path, NAMES, settled_seconds=3600)
    first = [step.number for step in follower.new_steps()]
    (tmp_path / "events.out.tfevents.2").write_bytes(content)
    follower._resting_until = 0.0
    second = [step.number for step in follower.new_steps()]
    assert [*first, *second] == list(range(29))
    assert not follower.rewritten
    assert list(follower.unfinished) == [29]


def test_a_database_of_trackio_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "trackio.db"
    path.write_bytes((DATA / "trackio.db").read_bytes())
    growing = Growing(path)
    assert growing.settle() == list(range(30))
    database = sqlite3.connect(path)
    row = database.execute("SELECT * FROM metrics ORDER BY id DESC LIMIT 1").fetchone()
    columns = [name for _, name, *_ in database.execute("PRAGMA table_info(metrics)")]
    new = dict(zip(columns, row, strict=True)) | {"step": 30, "metrics": '{"rollout_corr/k3_kl": 0.5}'}
    new["id"] = None
    places = ", ".join("?" * len(columns))
    database.execute(f"INSERT INTO metrics VALUES ({places})", tuple(new[name] for name in columns))
    database.commit()
    database.close()
    assert growing.settle() == [30]
    assert growing.steps[-1].values == {"rollout_corr/k3_kl": 0.5}


def test_a_half_written_line_is_waited_for_and_its_half_number_is_not_read(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "train.log")
    growing.append(b"Step 1 | Mismatch KL 0.0010\nStep 2 | Mismatch KL 0.0011\nStep 3 | Mismatch KL 0.00")
    growing.settle()
    assert [step.number for step in growing.steps] == [1]
    assert growing.append(b"12\n") == [2]
    assert growing.settle() == [3]
    assert growing.steps[-1].values == {"mismatch_kl/all/mean": 0.0012}


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_last_line_of_a_table_counts_once_it_has_its_end(tmp_path: Path, ending: str) -> None:
    growing = Growing(tmp_path / "chart.csv")
    growing.append(f'"Step","run - rollout_corr/k3_kl"\n1,0.001\n2,0.001\n3,0.12{ending}'.encode())
    growing.settle()
    assert [step.number for step in growing.steps] == ([1, 2, 3] if ending else [1, 2])


def test_a_step_that_two_writers_write_is_complete_once_it_has_what_the_step_before_had(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        growing.append(line(step, mismatch_kl__all__mean=0.001) + b"\n")
        growing.append(line(step, off_policy__mean=1.0) + b"\n")
    assert [step.number for step in growing.steps] == [1]
    assert growing.append(line(3, mismatch_kl__all__mean=0.001) + b"\n") == [2]
    assert growing.append(line(4, mismatch_kl__all__mean=0.001) + b"\n") == []
    assert growing.append(line(3, off_policy__mean=1.0) + b"\n") == [3]
    assert growing.steps[-1].values == {"mismatch_kl/all/mean": 0.001, "off_policy/mean": 1.0}
    assert growing.settle() == []
    assert growing.follower.unfinished == {4: "it has no off_policy/mean yet, which the step before has"}


def test_steps_that_repeat_after_a_restart_are_named_and_not_judged_again(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "metrics.jsonl")
    growing.append(b"".join(line(step, rollout_corr__k3_kl=0.001 * (step + 1)) + b"\n" for step in range(6)))
    growing.settle()
    again = b"".join(line(step, rollout_corr__k3_kl=0.002) + b"\n" for step in range(3, 8))
    assert growing.append(again) == [6]
    assert growing.settle() == [7]
    assert list(growing.follower.rewritten) == [3, 4, 5]
    assert [step.number for step in growing.steps] == list(range(8))


def test_a_restart_that_writes_the_same_numbers_is_not_mentioned(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "metrics.jsonl")
    content = b"".join(line(step, rollout_corr__k3_kl=float("nan")) + b"\n" for step in range(6))
    growing.append(content)
    growing.settle()
    growing.append(content)
    assert not growing.follower.rewritten


@pytest.mark.slow
def test_a_file_that_is_replaced_by_a_shorter_one_is_named_and_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step, rollout_corr__k3_kl=0.001) + b"\n" for step in range(6)))
    os.utime(path, (time.time() - 3600,) * 2)
    with watch_beside(path, *OFTEN, "--idle", 6) as watch:
        watch.wait_for("step 5:")
        other = tmp_path / "other"
        other.write_bytes(b"".join(line(step, rollout_corr__k3_kl=0.001) + b"\n" for step in (0, 1, 7, 8)))
        os.utime(other, (time.time() - 1800,) * 2)
        other.replace(path)
        answer = watch.end()
    record = WatchRecord.model_validate_json(answer.stdout)
    assert [step.step for step in record.steps] == [0, 1, 2, 3, 4, 5, 7, 8]
    assert "was replaced or cut short: it no longer has 4 steps of those that were judged (2 to 5)" in answer.stderr
    assert answer.returncode == ExitCode.INCONCLUSIVE
    assert "absent from the log: step 6" in answer.stderr


@pytest.mark.slow
def test_a_log_whose_first_step_is_minutes_away_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("loading the model\n")
    with watch_beside(path, *OFTEN, "--idle", 20) as watch:
        watch.wait_for("waiting:")
        with path.open("a") as file:
            file.writelines(f"Step {step} | Mismatch KL 0.{'5' if step > 3 else '0'}010\n" for step in range(12))
        answer = watch.end()
    assert answer.returncode == ExitCode.GATE_FAILED
    assert WatchRecord.model_validate_json(answer.stdout).stopped_at == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_file_that_grows_is_a_pass(watches: dict[str, Watching], name: str) -> None:
    answer = watches[name].end()
    record = WatchRecord.model_validate_json(answer.stdout)
    assert answer.returncode == ExitCode.PASS, answer.stderr
    assert not [event for step in record.steps for event in step.events]
    assert record.contradictions == []
    assert record.format == "metrics"
    assert f"judged {record.num_judged} of {len(record.steps)} steps" in answer.stderr
