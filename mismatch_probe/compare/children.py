"""The parent's side of a job: start the child, pass its events on, and end it cleanly whatever happens."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mismatch_probe.compare.events import AnyEvent, Failure, parse
from mismatch_probe.compare.plan import Job
from mismatch_probe.errors import EngineError, OutOfMemory
from mismatch_probe.records.atomic import storage_errors
from mismatch_probe.records.regular_files import open_to_append, read_text
from mismatch_probe.records.run_directory import RunDirectory

_GRACE_SECONDS = 10.0
_LOG_LINES = 3


def run_job(run: RunDirectory, job: Job, on_event: Callable[[AnyEvent], None]) -> None:
    """Run a job in a process of its own, its output in `RUN/logs/JOB.log`.

    Raises:
        MismatchProbeError: the failure the child reported, or EngineError when it died without a word.
        KeyboardInterrupt: the user interrupted; the child is stopped first.
    """
    log_path = run.log_path(job.name)
    reading, writing = os.pipe()
    with storage_errors(log_path):
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = open_to_append(log_path)
    with log:
        child = subprocess.Popen(
            [sys.executable, "-m", "mismatch_probe.compare.worker", str(run.path), job.name, str(writing)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    follow_up = threading.Thread(target=_end_what_is_left, args=(child,))
    follow_up.start()
    failure = None
    try:
        with os.fdopen(reading, encoding="utf-8") as events:
            for line in events:
                event = parse(line)
                if isinstance(event, Failure):
                    failure = event
                on_event(event)
        child.wait()
    finally:
        _stop(child)
        follow_up.join()
    if failure is not None:
        raise failure.as_exception()
    if child.returncode != 0:
        raise _died(job, child.returncode, log_path)


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        _signal_group(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
    if child.poll() is None:
        _signal_group(child, signal.SIGKILL)
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _end_what_is_left(child: subprocess.Popen[bytes]) -> None:
    """An engine in processes of its own outlives a child that is killed, and holds a GPU and the pipe of the events."""
    child.wait()
    _signal_group(child, signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _died(job: Job, code: int, log_path: Path) -> EngineError:
    if code == -signal.SIGKILL:
        return OutOfMemory(
            f"{job.name} was killed, most likely by the system for want of memory: lower --max-new-tokens, "
            "training.batch_tokens or the engine's cache, then continue with --resume"
        )
    lines = [line for line in read_text(log_path, errors="replace").splitlines() if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    tail = " | ".join(lines[-_LOG_LINES:]) or "its log is empty"
    return EngineError(f"{job.name} ended with {how}: {tail} (whole log: {log_path})")
