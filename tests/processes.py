"""Which processes a command has, found in Linux's /proc, and what named memory is left of those that ended."""

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from mismatch_probe.children.messages import SEGMENTS, held_by

ENDING_SECONDS: Final = 20.0
"""What ends with its parent does so in less than five seconds of a machine that has nothing else to do."""


def processes_of(folder: Path, variable: str = "") -> list[int]:
    """Those that work in the folder, or were started with the variable, `NAME=VALUE`, and are no zombies.

    A command's jobs keep its folder; only a new interpreter shows its own variables, and a fork those of what it is
    forked from.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            is_there = (entry / "cwd").readlink() == folder
            is_marked = bool(variable) and variable.encode() in (entry / "environ").read_bytes()
            is_zombie = "State:\tZ" in (entry / "status").read_text()
        except OSError:
            continue
        if (is_there or is_marked) and not is_zombie:
            found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they did."""
    try:
        children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def ended(pids: Iterable[int], seconds: float = ENDING_SECONDS) -> bool:
    """Whether all end within so long."""
    running = list(pids)
    deadline = time.monotonic() + seconds
    while (running := list(filter(is_running, running))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not running


def wait_until_gone(folder: Path, seconds: float = ENDING_SECONDS) -> None:
    """Until no process works there; what is left after so long is named."""
    deadline = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def left_memory(since: float) -> list[str]:
    """Named memory of the program and its engines that was made since then, and that no process has mapped."""
    made_files = set()
    with suppress(OSError):
        for path in SEGMENTS.iterdir():
            with suppress(OSError):
                if re.match("mismatch-probe-|.*-cpushm_", path.name) and path.stat().st_mtime >= since:
                    made_files.add(path)
    return sorted(path.name for path in made_files - held_by(Path("/proc").glob("[0-9]*")))
