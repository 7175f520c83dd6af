"""What passes between a command and its jobs: events on a pipe, requests on a socket, named memory.

A library's own names can be the same in every run: a second one would find what a killed one left, or share it with one
that runs at the same time. Names that this package chooses hold the job's token; of others, only those are taken away
that libraries give and the job's processes have mapped, so that no file that a person keeps there is touched.
"""

import json
import os
import re
import shutil
import signal
import socket
import struct
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from mismatch_probe import errors

Send = Callable[[Any], None]
"""Sends a JSON value to the parent."""

MESSAGE: Final = "message"
RESULT: Final = "result"
FAILURE: Final = "failure"


def write(stream: IO[str], kind: str, content: Any) -> None:
    stream.write(json.dumps({kind: content}) + "\n")
    stream.flush()


def read(line: str) -> tuple[str, Any]:
    """The kind and the content of a line."""
    [(kind, content)] = json.loads(line).items()
    return kind, content


def describe_error(error: Exception, name: str) -> dict[str, str]:
    """An error of the job `name` as plain values: its own sentence, or that it was not expected.

    An error class that only one package knows is sent as its nearest base class in `errors`.
    """
    kind, message = type(error), str(error)
    if isinstance(error, errors.MismatchProbeError):
        kind = next(ancestor for ancestor in kind.__mro__ if getattr(errors, ancestor.__name__, None) is ancestor)
    else:
        what = f"{kind.__name__}: {error}".splitlines()[0]
        kind, message = errors.EngineError, f"{name} failed unexpectedly: {what}"
    where = "".join(traceback.format_exception(error))
    return {"error": kind.__name__, "message": message, "where": f"In the process of {name}:\n{where}"}


def as_exception(description: dict[str, str]) -> errors.MismatchProbeError:
    """The error that `describe_error` was given; its traceback there is a note, which a traceback here shows."""
    kind: type[errors.MismatchProbeError] = getattr(errors, description["error"], errors.EngineError)
    error = kind(description["message"])
    error.add_note(description["where"])
    return error


_NUMBER: Final = struct.Struct("!q")
_LENGTH: Final = struct.Struct("!Q")
_MOST_DESCRIPTORS: Final = 3


def send(control: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """
    Raises:
        OSError: nobody listens.
    """
    body = json.dumps(content).encode()
    socket.send_fds(control, [_LENGTH.pack(len(body))], descriptors)
    control.sendall(body)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors; None when the other end is closed."""
    try:
        head, descriptors, _, _ = socket.recv_fds(control, _LENGTH.size, _MOST_DESCRIPTORS)
        if len(head) < _LENGTH.size:
            return None
        body = _receive_exactly(control, _LENGTH.unpack(head)[0])
    except ConnectionError:
        return None
    return None if body is None else (json.loads(body), descriptors)


def send_number(pipe: int, number: int) -> bool:
    """Write a number: a job's process, then its exit code; False when the other end is closed."""
    try:
        os.write(pipe, _NUMBER.pack(number))
    except OSError:
        return False
    return True


def read_number(pipe: int) -> int | None:
    """The next number; None when the other end is closed."""
    data = os.read(pipe, _NUMBER.size)
    return int(_NUMBER.unpack(data)[0]) if data else None


def _receive_exactly(control: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = control.recv(min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


SHARED_MEMORY_VARIABLE: Final = "MISMATCH_PROBE_SHARED_MEMORY"
SEGMENTS: Final = Path("/dev/shm")
_OF_LIBRARIES: Final = re.compile(r"psm_[0-9a-f]+|sem\.mp-\w+|(?P<meeting>vllm_dist_[0-9a-f]+)?-?tp:.*-cpushm_\d+")
"""Python's multiprocessing, and vLLM's ranks on a CPU, which name it by the file in which they meet."""


def new_token() -> str:
    return f"mismatch-probe-{uuid.uuid4().hex[:12]}"


@cache
def own_token() -> str:
    """The token of the job that this process belongs to; one of its own outside of jobs."""
    return os.environ.get(SHARED_MEMORY_VARIABLE) or new_token()


def folder_of(token: str) -> Path:
    """Where sockets of a job belong: a short path, since that of a socket may have 107 characters."""
    return Path(tempfile.gettempdir()) / token


def is_job() -> bool:
    """Whether this process is of a job, with whose end a server removes what is left."""
    return SHARED_MEMORY_VARIABLE in os.environ


def held_by(processes: Iterable[Path]) -> set[Path]:
    """Files that these processes, folders of /proc, have open, and named memory that they have mapped."""
    files: set[Path] = set()
    for process in processes:
        with suppress(OSError, ValueError):
            files |= _mapped_in(process) | _open_in(process)
    return files


def mapped_by(processes: Iterable[Path]) -> set[Path]:
    """Segments under names of libraries that these processes have open or mapped."""
    return {path for path in held_by(processes) if path.parent == SEGMENTS and _OF_LIBRARIES.fullmatch(path.name)}


def processes_in(group: int) -> Iterator[Path]:
    """The processes of a process group, as folders of /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                yield process


def processes_with(token: str) -> Iterator[Path]:
    """The processes that were started with this token in their environment, as folders of /proc.

    Without multiprocessing's own, which removes what is left of it once the others have ended.
    """
    variable = f"{SHARED_MEMORY_VARIABLE}={token}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_started_with_token = variable in (process / "environ").read_bytes().split(b"\0")
            if is_started_with_token and b"resource_tracker" not in (process / "cmdline").read_bytes():
                yield process


def end_processes_with(token: str) -> set[Path]:
    """Kill these processes, and return the segments that `mapped_by` sees just before; stopped as in `signal_group`."""
    processes = list(processes_with(token))
    pids = [int(process.name) for process in processes]
    _send_to_each(pids, signal.SIGSTOP)
    mapped_files = mapped_by(processes)
    _send_to_each(pids, signal.SIGKILL)
    return mapped_files


def _send_to_each(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_group(group: int, number: signal.Signals) -> set[Path]:
    """Send the signal to a process group, and return the segments that `mapped_by` sees just before.

    The group is stopped in between: processes that all end at the signal show no segment afterwards, and one that was
    made between the look and the signal would be missed.
    """
    mapped_files: set[Path] = set()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGSTOP)
        try:
            mapped_files = mapped_by(processes_in(group))
        finally:
            os.killpg(group, number)
            os.killpg(group, signal.SIGCONT)
    return mapped_files


def _mapped_in(process: Path) -> set[Path]:
    lines = (process / "maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if f" {SEGMENTS}/" in line}


def _open_in(process: Path) -> set[Path]:
    paths: set[Path] = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            paths.add(descriptor.readlink())
    return paths


def remove_left(token: str, mapped_files: Iterable[Path] = ()) -> None:
    """Remove what is left under names that hold the token, and what was mapped, with the file its ranks met in.

    A system without named memory has none.
    """
    shutil.rmtree(folder_of(token), ignore_errors=True)
    with suppress(OSError):
        for segment in SEGMENTS.iterdir():
            if token in segment.name:
                segment.unlink(missing_ok=True)
    for segment in mapped_files:
        match = _OF_LIBRARIES.fullmatch(segment.name)
        with suppress(OSError):
            segment.unlink(missing_ok=True)
            if match is not None and match["meeting"]:
                (Path(tempfile.gettempdir()) / match["meeting"]).unlink(missing_ok=True)
