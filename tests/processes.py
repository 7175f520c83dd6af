"""Which processes a command has, found in Linux's /proc."""

import time
from pathlib import Path


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


def wait_until_gone(folder: Path, seconds: float = 5.0) -> None:
    """Until no process works there; what is left after so long is named."""
    deadline = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
