"""Each pytest worker keeps to cores of its own: threads of two that meet on one core wait for each other's turn."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_CAN_KEEP: Final = hasattr(os, "sched_setaffinity")
_EVERY_CORE: Final = "MISMATCH_PROBE_TEST_CORES"
"""The variable in which a worker's processes find the cores that all workers share."""


def keep_to_own_cores() -> None:
    """Have this worker, and all that it starts, compute on its share of the cores; without workers on all of them."""
    if not _CAN_KEEP:
        return
    cores = sorted(os.sched_getaffinity(0))
    os.environ[_EVERY_CORE] = ",".join(map(str, cores))
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[number::workers] or {cores[number % len(cores)]})


def num_own_cores() -> int:
    return len(os.sched_getaffinity(0)) if _CAN_KEEP else os.cpu_count() or 1


def take_every_core() -> None:
    """For a process that shares its work among threads, or with other processes."""
    if _CAN_KEEP:
        os.sched_setaffinity(0, map(int, os.environ[_EVERY_CORE].split(",")))


@contextmanager
def every_core() -> Iterator[None]:
    """What several threads compute together is tested inside."""
    own = os.sched_getaffinity(0) if _CAN_KEEP else set()
    take_every_core()
    try:
        yield
    finally:
        if _CAN_KEEP:
            os.sched_setaffinity(0, own)
