"""How many processes answer at one address, by what each of them says of itself."""

import re
from typing import Final

from mismatch_probe.engines.server.connection import Connection, Request, Unserved
from mismatch_probe.errors import EngineError, UsageError

_PATH: Final = "/metrics"
_STARTED: Final = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)
"""When the process that answers was started, as Prometheus's client for Python says it."""
_TIMES: Final = 16
_MOST_BYTES: Final = 2**24


def processes_behind(connection: Connection) -> int | None:
    """How many were met in a few requests at once, over as many connections as are allowed; None where none says so."""
    requests = [Request(_PATH, is_text=True, most_bytes=_MOST_BYTES)] * _TIMES

    def started(number: int, text: str) -> str | None:
        said = _STARTED.search(text)
        return None if said is None else said[1]

    try:
        times = connection.ask_all(requests, started)
    except (Unserved, UsageError, EngineError):
        return None
    return len({*times} - {None}) or None
