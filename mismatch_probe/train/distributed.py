"""The process group of a run, the seconds of its steps, and how often costly checks are due."""

import atexit
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from mismatch_probe.training_path.precision import leave_process_group

Record = TypeVar("Record")

_GROUPS: Final = count()


def join_process_group(device: torch.device) -> None:
    """Join the ranks that torchrun started, or form a group of one; harmless when repeated.

    An engine that is closed takes the group down with it. The next group needs keys of its own in torchrun's store,
    where the addresses of the last one still stand.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if _by_torchrun():
        store, _, _ = next(rendezvous("env://"))
        own_keys = PrefixStore(f"group-{next(_GROUPS)}", store)
        dist.init_process_group(backend, store=own_keys, rank=rank(), world_size=world_size())
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    atexit.register(leave_process_group)


def rank() -> int:
    """This process's number, also before it has joined the group."""
    return int(os.environ["RANK"]) if _by_torchrun() else 0


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if _by_torchrun() else 1


def is_main() -> bool:
    return rank() == 0


def engine_share(items: Sequence[Record], ranks_an_engine: int) -> Sequence[Record]:
    """The share of the items for this rank's engine, which it may hold with its neighbours."""
    return items[rank() // ranks_an_engine :: world_size() // ranks_an_engine]


def speaks_for_engine(ranks_an_engine: int) -> bool:
    """Whether this rank is the first of the ranks that hold one engine and have the same answers."""
    return rank() % ranks_an_engine == 0


def gather(own: list[Record]) -> list[Record]:
    """The records of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return own
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, own)
    return [record for part in parts for record in part]


def largest(value: float) -> float:
    """The largest of the ranks' values; NaN where one is."""
    return float(np.max(gather([value])))


def as_first_rank_has_it(own: Record) -> Record:
    """The first rank's value on every rank, for measurements that all ranks must judge equally."""
    return gather([own])[0]


def _by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@dataclass
class CheckTurns:
    """Decides at which steps costly checks are due.

    Without a bound they are due at every step; else once the seconds of the last check are at most `max_cost` of the
    seconds since its step began. No state is saved: the first step of a resumed run is checked.
    """

    max_cost: float | None
    _check_seconds: float = 0.0
    _passed_seconds: float = 0.0

    def is_due(self, *, in_doubt: bool) -> bool:
        """Whether a check is due; it always is where a guard doubts the steps before (`in_doubt`)."""
        if self.max_cost is None or in_doubt:
            return True
        return self._check_seconds <= self.max_cost * self._passed_seconds

    def took(self, step_seconds: float, check_seconds: float | None) -> None:
        """Record the seconds of a step; `check_seconds` is None where it was not checked."""
        if check_seconds is not None:
            self._check_seconds, self._passed_seconds = check_seconds, 0.0
        self._passed_seconds += step_seconds


_DONE_TO_TOKENS: Final = {"sample": "sampled", "score": "scored", "learn": "learned"}
_SHORTEST_SECONDS: Final = 1e-9


class Clock:
    """Adds up wall-clock seconds under names."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count seconds of one phase under another."""
        self.seconds[phase] -= seconds
        self.seconds[to] += seconds

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """`time/PHASE_seconds`, `time/step_seconds`, and response tokens a second: of the step, and of each phase that
        works on all of them.
        """
        total = time.perf_counter() - self._start
        times = {f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        paces = {
            f"time/{verb}_tokens_per_second": num_tokens / max(self.seconds[phase], _SHORTEST_SECONDS)
            for phase, verb in _DONE_TO_TOKENS.items()
        }
        return times | paces | {"time/step_seconds": total, "time/tokens_per_second": num_tokens / total}
