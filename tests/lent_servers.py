"""Servers of jobs that a pytest worker lends to a new interpreter: its own would import for eight seconds.

Whoever lends them waits until the interpreter has ended, so no two ask at a time.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_probe.children import messages, servers
from mismatch_probe.children.servers import Preload


def lend() -> dict[Preload, int]:
    """Of each stage the descriptor at which its server of this process is asked, for `borrow` and `pass_fds`."""
    stages: tuple[Preload, ...] = ("training", "engine")
    servers.warm_up(*stages)
    running = servers._servers
    assert running is not None
    return {stage: running._controls[stage].fileno() for stage in stages}


def borrow(descriptors: Mapping[str, int]) -> None:
    """Call in the interpreter before it asks for a job."""
    servers._servers = _Lent(descriptors)  # type: ignore[assignment]


class _Lent:
    """As `servers` knows its own; they go on when this process has ended."""

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._controls = {stage: socket.socket(fileno=descriptor) for stage, descriptor in descriptors.items()}

    def send(self, stage: str, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        messages.send(self._controls[stage], content, descriptors)

    def serve(self) -> bool:
        return True

    def close(self) -> None:
        for control in self._controls.values():
            control.close()
