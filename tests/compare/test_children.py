import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_probe.compare.children import run_job
from mismatch_probe.compare.events import BatchDone, Failure, StageStarted, parse
from mismatch_probe.compare.plan import Job
from mismatch_probe.errors import EngineError, OutOfMemory, RunDirectoryError
from mismatch_probe.records.run_directory import RunDirectory

JOB = Job("engine-bf16", ())


def worker_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let the child interpreter run `code` instead of the worker module."""
    script = tmp_path / "python"
    body = tmp_path / "child.py"
    body.write_text(code)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {body} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_the_childs_failure_comes_back_as_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        run_job(RunDirectory(tmp_path), JOB, lambda event: None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_the_childs_failure_is_told_although_its_log_cannot_be_written(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    words = [sys.executable, "-m", "mismatch_probe.compare.worker", str(tmp_path), JOB.name, str(writing)]
    with Path("/dev/full").open("w") as full:
        child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=full, stderr=full, pass_fds=(writing,), start_new_session=True
        )
    os.close(writing)
    with os.fdopen(reading) as events:
        told = [parse(line) for line in events]
    child.communicate()
    assert [event.error for event in told if isinstance(event, Failure)] == ["RunDirectoryError"]


def test_what_the_child_prints_goes_to_its_log_and_not_to_the_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_that(monkeypatch, tmp_path, "print('{noise}')")
    events: list[object] = []
    run_job(RunDirectory(tmp_path), JOB, events.append)
    assert events == []
    assert "{noise}" in RunDirectory(tmp_path).log_path(JOB.name).read_text()


def test_a_child_that_dies_without_a_word_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_that(monkeypatch, tmp_path, "import sys; print('illegal instruction'); sys.exit(7)")
    with pytest.raises(EngineError, match=r"exit code 7: illegal instruction \(whole log"):
        run_job(RunDirectory(tmp_path), JOB, lambda event: None)


def test_a_child_killed_by_the_system_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_that(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(OutOfMemory, match="--resume"):
        run_job(RunDirectory(tmp_path), JOB, lambda event: None)


def test_what_a_killed_child_leaves_running_ends_with_it_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, signal, sys, time\n"
        "if os.fork():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(5)\n"
        "open(sys.argv[-3] + '/survived', 'w')\n"
    )
    worker_that(monkeypatch, tmp_path, code)
    with pytest.raises(OutOfMemory):
        run_job(RunDirectory(tmp_path), JOB, lambda event: None)
    assert not (tmp_path / "survived").exists()


def test_an_interrupt_stops_the_child_before_it_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys, time\n"
        "stream = os.fdopen(int(sys.argv[-1]), 'w')\n"
        "print(os.getpid(), file=open(sys.argv[-3] + '/pid', 'w'), flush=True)\n"
        'stream.write(\'{"kind": "stage_started", "stage": "s", "batches": 1, "batches_done": 0}\\n\')\n'
        "stream.flush()\n"
        "time.sleep(60)\n"
    )
    worker_that(monkeypatch, tmp_path, code)

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(RunDirectory(tmp_path), JOB, interrupt)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from mismatch_probe.compare import worker\n"
        "worker._die_with_parent()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.stdin.close()
    deadline = time.monotonic() + 20
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child.returncode == -signal.SIGKILL
    child.stdout.close()


def test_events_survive_the_pipe() -> None:
    for event in (
        StageStarted(stage="s", batches=3, batches_done=1),
        BatchDone(stage="s", sequences=2, tokens=30, seconds=0.5),
        Failure(error="UsageError", message="x"),
    ):
        assert parse(event.model_dump_json()) == event
