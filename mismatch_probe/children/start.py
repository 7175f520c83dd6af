"""Start a job, or the ranks that hold one model, receive its messages, and end it whatever happens.

A rank's `RankPlace` says which it is and where they meet. The variables are torchrun's, which libraries read too.
"""

import logging
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import IO, Any, Final, Self, cast

from mismatch_probe.children import servers
from mismatch_probe.children.job import JobFunction, JobRequest, name_of
from mismatch_probe.children.messages import (
    FAILURE,
    MESSAGE,
    RESULT,
    SHARED_MEMORY_VARIABLE,
    as_exception,
    new_token,
    read,
    read_number,
    remove_left,
    signal_group,
)
from mismatch_probe.children.servers import Preload, keep_scratch
from mismatch_probe.errors import EngineError, MismatchProbeError, OutOfMemory, RankLost
from mismatch_probe.records.files import open_to_append, read_regular_text, storage_errors

logger = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 10.0
_ENDING_SECONDS: Final = 60.0
"""How long a job may take to end once its result is here."""
_LOG_LINES: Final = 3
_READ_BYTES: Final = 2**16
_THREADS: Final = "Fatal Python error: "
"""Where a log goes on with what each thread was at: too much for a sentence."""


@dataclass(frozen=True)
class Job:
    """A function that runs in a process of its own."""

    name: str
    """What a sentence calls it."""
    function: JobFunction
    """A function of a module that this process can import; what it needs besides, it imports in the job."""
    arguments: tuple[Any, ...]
    """JSON values."""
    preload: Preload
    """The imports that it is forked from."""
    when_killed: str
    """What to do where memory was short, as the end of a sentence."""
    log: Path | None = None
    """Where its output goes; None keeps it only for the sentence of a failure."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has besides this process's."""


def run(job: Job, on_message: Callable[[Any], None] = lambda message: None) -> Any:
    """Run a job to its end and return what its function returned; `on_message` gets what it sends before.

    Raises:
        MismatchProbeError: the failure the job reported, or EngineError when it died without a word.
        StorageError: its log cannot be written.
        KeyboardInterrupt: the user interrupted; the job is ended first.
    """
    with result_of(job) as result:
        return result(on_message)


def run_each(
    job_of: Callable[[int, int], Job],
    num_jobs: int,
    at_once: int,
    on_message: Callable[[int, Any], None],
    on_end: Callable[[int, Any, MismatchProbeError | None], None],
) -> None:
    """Run jobs that do not need each other, `at_once` of them at a time, in their order.

    job_of: the job of a number from 0, called as it starts, and of the place that it takes, from 0 and below `at_once`.
    on_message: the job's number and what it sends. on_end: the job's number with what its function returned, or with
    the failure that `run` would raise; the next job starts after it.

    Raises:
        StorageError: a log cannot be written.
        KeyboardInterrupt: the user interrupted; all jobs that run are ended first.
    """
    waiting = iter(range(num_jobs))
    free = list(range(at_once))
    with ExitStack() as stack, DefaultSelector() as selector:

        def start_next() -> None:
            number = next(waiting, None)
            if number is None:
                return
            place = free.pop(0)
            own = stack.enter_context(ExitStack())
            process = own.enter_context(process_of(job_of(number, place)))
            selector.register(process, EVENT_READ, (number, place, own))

        for _ in range(at_once):
            start_next()
        while selector.get_map():
            for key, _ in selector.select():
                process = cast(Process, key.fileobj)
                number, place, own = key.data
                if process.hear(partial(on_message, number)):
                    continue
                selector.unregister(process)
                result, failure = None, None
                try:
                    result = process.outcome()
                except MismatchProbeError as error:
                    failure = error
                own.close()
                free.append(place)
                on_end(number, result, failure)
                start_next()


@contextmanager
def result_of(job: Job) -> Iterator[Callable[..., Any]]:
    """A job that runs while the body does, and a function that waits for its result as `run` does."""
    with process_of(job) as process:
        yield process.result


@contextmanager
def process_of(job: Job) -> Iterator["Process"]:
    """A job that runs while the body does, and is ended with it."""
    with _log_of(job) as log:
        process = Process(job, log)
        try:
            yield process
        finally:
            process.stop()


class Process:
    """A started job: what it sends, and how it ended."""

    def __init__(self, job: Job, log: IO[bytes]) -> None:
        self._job = job
        self._log = log
        self._code: int | None = None
        self._token = new_token()
        environment = {**os.environ, **job.environment, SHARED_MEMORY_VARIABLE: self._token}
        request = JobRequest(job.name, name_of(job.function), job.arguments, environment, str(Path.cwd()))
        messages, messages_there = os.pipe()
        status, status_there = os.pipe()
        try:
            servers.request(job.preload, vars(request), (log.fileno(), messages_there, status_there))
        finally:
            os.close(messages_there)
            os.close(status_there)
        self._messages = messages
        self._unread = b""
        self._status = status
        self._pid: int | None = None
        self._failure: dict[str, str] | None = None
        self._result: Any = None
        self._has_ended = False

    def result(self, on_message: Callable[[Any], None] = lambda message: None) -> Any:
        """Hear it to its end; returns and raises as `outcome`."""
        while self.hear(on_message):
            pass
        return self.outcome()

    def fileno(self) -> int:
        """What can be read from when there is something to hear."""
        return self._messages

    def hear(self, on_message: Callable[[Any], None]) -> bool:
        """Wait for the next words and take them; False when it will say no more."""
        read_now = os.read(self._messages, _READ_BYTES)
        *lines, self._unread = (self._unread + read_now).split(b"\n")
        for line in lines:
            kind, content = read(line.decode())
            if kind == MESSAGE:
                on_message(content)
            elif kind == RESULT:
                self._result, self._has_ended = content, True
            elif kind == FAILURE:
                self._failure, self._has_ended = content, True
        return bool(read_now)

    def outcome(self) -> Any:
        """What the function returned, once nothing more can be read; a job that does not end then is ended.

        Raises:
            MismatchProbeError: the failure the job reported, or EngineError when it died without a word.
        """
        self._pid = self._pid or read_number(self._status)
        hangs = not self._wait(_ENDING_SECONDS if self._has_ended else None)
        if self._failure is not None:
            raise as_exception(self._failure)
        if hangs:
            logger.warning(
                "%s did not end within %g s after it was done, and is ended", self._job.name, _ENDING_SECONDS
            )
        elif self._code != 0:
            raise self._death()
        return self._result

    def stop(self) -> None:
        """End it if it runs. One that waits for the server's imports ends as it starts: nobody hears its status."""
        if self._pid is None and select.select([self._status], [], [], 0)[0]:
            self._pid = read_number(self._status)
        if self._pid is not None and self._code is None:
            mapped_files = signal_group(self._pid, signal.SIGTERM)
            if not self._wait(_GRACE_SECONDS):
                mapped_files |= signal_group(self._pid, signal.SIGKILL)
                self._wait(None)
            remove_left(self._token, mapped_files)
        os.close(self._messages)
        os.close(self._status)

    def _wait(self, seconds: float | None) -> bool:
        """Whether it ended in time."""
        if self._code is None:
            if not select.select([self._status], [], [], seconds)[0]:
                return False
            self._code = read_number(self._status)
        return True

    def _death(self) -> EngineError:
        if self._code == -signal.SIGKILL:
            return OutOfMemory(
                f"{self._job.name} was killed, most likely by the system for want of memory: {self._job.when_killed}"
            )
        output, _, _ = self._log_text().partition(_THREADS)
        lines = [line for line in output.splitlines() if line.strip()]
        if self._code is None:
            how = "the server that starts it"
        elif self._code < 0:
            how = f"signal {signal.Signals(-self._code).name}"
        else:
            how = f"exit code {self._code}"
        tail = " | ".join(lines[-_LOG_LINES:]) or "its log is empty"
        where = "" if self._job.log is None else f" (whole log: {self._job.log})"
        return EngineError(f"{self._job.name} ended with {how}: {tail}{where}; see `mismatch-probe doctor`")

    def _log_text(self) -> str:
        if self._job.log is not None:
            return read_regular_text(self._job.log, errors="replace")
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@contextmanager
def _log_of(job: Job) -> Iterator[IO[bytes]]:
    if job.log is None:
        with tempfile.TemporaryFile() as log:
            yield log
        return
    with storage_errors(job.log):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log_file = open_to_append(job.log)
    with log_file:
        yield log_file


_WATCH_SECONDS: Final = 1.0
_CAUSE_SECONDS: Final = 5.0
"""How long the process whose loss another one reports is given to say why it ended, or to be seen dead."""
_LEAVING_SECONDS: Final = 60.0
"""How long the others are given to end once the first one is done."""


@dataclass(frozen=True)
class RankPlace:
    """Which of the processes that hold one model a process is."""

    rank: int
    ranks: int
    local_rank: int
    """Of the `local_ranks` on this machine, and so its GPU."""
    local_ranks: int
    meeting: str
    """Where they find each other: `file:PATH` on one machine, `tcp:HOST:PORT/NAME` in torchrun's store."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


@contextmanager
def places_here(ranks: int) -> Iterator[list[RankPlace]]:
    """So many places on this machine, for as long as the body runs."""
    with TemporaryDirectory(prefix="mismatch-probe-ranks-") as folder:
        keep_scratch(Path(folder))
        meeting = f"file:{Path(folder) / 'meeting'}"
        yield [RankPlace(rank, ranks, rank, ranks, meeting) for rank in range(ranks)]


def in_place(job: Job, place: RankPlace) -> Job:
    """The job as the process of a rank; the place is its function's last argument."""
    name = job.name if place.rank == 0 else f"rank {place.rank} of {job.name}"
    arguments = (*job.arguments, place.to_json())
    return replace(job, name=name, arguments=arguments, environment={**job.environment, **place.environment})


def run_together(
    first: Job, others: Sequence[Job], on_message: Callable[[Any], None], watch: Callable[[], None] | None = None
) -> Any:
    """Run jobs that need each other, and return what the first one's function returned.

    Where one fails all end, with the failure of the one that did not only lose another. `watch` is called every second,
    and all end with what it raises. One that hangs once the first is done is ended with a warning: nothing is missing.

    Raises:
        MismatchProbeError: that failure.
        KeyboardInterrupt: the user interrupted; all are ended first.
    """
    with ExitStack() as stack, DefaultSelector() as selector:
        processes = [stack.enter_context(process_of(job)) for job in (first, *others)]
        for process in processes:
            selector.register(process, EVENT_READ)
        answers: list[Any] = []
        loss: RankLost | None = None
        patience = inf
        while selector.get_map() and time.monotonic() < patience:
            for key, _ in selector.select(_WATCH_SECONDS):
                process = cast(Process, key.fileobj)
                if process.hear(on_message if process is processes[0] else lambda message: None):
                    continue
                selector.unregister(process)
                try:
                    answer = process.outcome()
                except RankLost as error:
                    loss = loss or error
                    patience = min(patience, time.monotonic() + _CAUSE_SECONDS)
                else:
                    if process is processes[0]:
                        answers.append(answer)
                        patience = min(patience, time.monotonic() + _LEAVING_SECONDS)
            if watch is not None:
                watch()
        while loss is not None and watch is not None and time.monotonic() < patience:
            time.sleep(_WATCH_SECONDS)
            watch()
        if loss is not None:
            raise loss
        if hanging := len(selector.get_map()):
            logger.warning(
                "%d of the %d ranks of %s did not end within %g s after the first one was done, and were ended",
                *(hanging, len(processes), first.name, _LEAVING_SECONDS),
            )
        return answers[0]
