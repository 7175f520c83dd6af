"""Named memory and sockets, which outlive a job that is killed: known by the job's token, or by who has them open.

A library's own names can be the same in every run: a second one would find what a killed one left, or share it with one
that runs at the same time. Names that this package chooses hold the job's token; of others, only those are taken away
that libraries give and the job's processes have mapped, so that no file that a person keeps there is touched.
"""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

VARIABLE: Final = "MISMATCH_PROBE_SHARED_MEMORY"
_SEGMENTS: Final = Path("/dev/shm")
_OF_LIBRARIES: Final = re.compile(r"psm_[0-9a-f]+|sem\.mp-\w+|(?P<meeting>vllm_dist_[0-9a-f]+)?-?tp:.*-cpushm_\d+")
"""Python's multiprocessing, and vLLM's ranks on a CPU, which name it by the file in which they meet."""


def new_token() -> str:
    return f"mismatch-probe-{uuid.uuid4().hex[:12]}"


@cache
def own_token() -> str:
    """The token of the job that this process belongs to; one of its own outside of jobs."""
    return os.environ.get(VARIABLE) or new_token()


def folder_of(token: str) -> Path:
    """Where sockets of a job belong: a short path, since that of a socket may have 107 characters."""
    return Path(tempfile.gettempdir()) / token


def mapped_by(group: int) -> set[Path]:
    """Segments under names of libraries that processes of this group have mapped."""
    mapped: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                mapped |= {Path(line[line.index("/") :]) for line in lines if f" {_SEGMENTS}/" in line}
    return {path for path in mapped if path.parent == _SEGMENTS and _OF_LIBRARIES.fullmatch(path.name)}


def remove_left(token: str, mapped: Iterable[Path] = ()) -> None:
    """Remove what is left under names that hold the token, and what was mapped, with the file its ranks met in.

    A system without named memory has none.
    """
    shutil.rmtree(folder_of(token), ignore_errors=True)
    with suppress(OSError):
        for segment in _SEGMENTS.iterdir():
            if token in segment.name:
                segment.unlink(missing_ok=True)
    for segment in mapped:
        named = _OF_LIBRARIES.fullmatch(segment.name)
        with suppress(OSError):
            segment.unlink(missing_ok=True)
            if named is not None and named["meeting"]:
                (Path(tempfile.gettempdir()) / named["meeting"]).unlink(missing_ok=True)
