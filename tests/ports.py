"""Ports on which servers of tests listen, and ranks of tests meet."""

import random
import socket
from typing import Final

_PORTS: Final = range(20_000, 32_000)
"""Below those that the system gives to connections, of which one could take a free port before its server does."""
_claims: Final[list[socket.socket]] = []


def free_port() -> int:
    """A port that nobody listens on, and that no process of the tests takes as long as this one lives."""
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0mismatch-probe-tests-port-{port}")
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise AssertionError("every port is taken")
