"""Shared memory that a job's libraries name by its token, so that a killed job's segments are known and removed.

The names of a library's own are the same in every run: a second one would find what a killed one left, or share it
with one that runs at the same time.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

VARIABLE: Final = "MISMATCH_PROBE_SHARED_MEMORY"
_SEGMENTS: Final = Path("/dev/shm")


def new_token() -> str:
    return f"mismatch-probe-{uuid.uuid4().hex}"


def own_token() -> str:
    """The token of the job that this process belongs to; one of its own outside of jobs."""
    return os.environ.get(VARIABLE) or new_token()


def remove_segments(token: str) -> None:
    """Remove what is left under names that hold the token; a system without named segments has none."""
    with suppress(OSError):
        for segment in _SEGMENTS.iterdir():
            if token in segment.name:
                segment.unlink(missing_ok=True)
