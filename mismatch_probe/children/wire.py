"""Requests on a socket: a length, a JSON object, and the descriptors that belong to it; numbers on a pipe."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

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
