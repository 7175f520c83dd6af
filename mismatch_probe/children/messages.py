"""What passes between a command and its jobs: events as JSON lines on a pipe, requests on a socket."""

import json
import os
import socket
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any, Final

from mismatch_probe import errors

Send = Callable[[Any], None]
"""Tell the parent something that is JSON."""

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


def described(error: Exception, name: str) -> dict[str, str]:
    """An error of the job `name` as plain values: its own sentence, or that it was not expected.

    One of a kind that a room keeps to itself is told as what it is a kind of.
    """
    kind, message = type(error), str(error)
    if isinstance(error, errors.MismatchProbeError):
        kind = next(known for known in kind.__mro__ if getattr(errors, known.__name__, None) is known)
    else:
        what = f"{kind.__name__}: {error}".splitlines()[0]
        kind, message = errors.EngineError, f"{name} failed unexpectedly: {what}"
    where = "".join(traceback.format_exception(error))
    return {"error": kind.__name__, "message": message, "where": f"In the process of {name}:\n{where}"}


def as_exception(description: dict[str, str]) -> errors.MismatchProbeError:
    """The error that `described` was given; its traceback there is a note, which a traceback here shows."""
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
        body = _exactly(control, _LENGTH.unpack(head)[0])
    except ConnectionError:
        return None
    return None if body is None else (json.loads(body), descriptors)


def send_number(pipe: int, number: int) -> bool:
    """Tell a number: a job's process, then its exit code; False when nobody hears it."""
    try:
        os.write(pipe, _NUMBER.pack(number))
    except OSError:
        return False
    return True


def read_number(pipe: int) -> int | None:
    """The next number; None when whoever tells it is gone."""
    data = os.read(pipe, _NUMBER.size)
    return int(_NUMBER.unpack(data)[0]) if data else None


def _exactly(control: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = control.recv(min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
