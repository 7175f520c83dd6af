"""A command that torchrun started on every rank: the first rank runs it, and the others join jobs that need ranks.

Ranks communicate through torchrun's store, so they may be on several machines; only the first reads the run directory.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from mismatch_probe.children import start
from mismatch_probe.children.job import JobFunction, function_of, name_of
from mismatch_probe.children.messages import as_exception, describe_error
from mismatch_probe.children.servers import Preload
from mismatch_probe.children.start import Job, RankPlace, in_place, run_together
from mismatch_probe.errors import ExitCode, MismatchProbeError, RankLost

_RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMOVED_VARIABLES: Final = (
    *_RANK_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
_ELASTIC: Final = "TORCHELASTIC_"
_THREADS: Final = "OMP_NUM_THREADS"
_POLL_SECONDS: Final = 0.2
_GOODBYE_SECONDS: Final = 10.0
_GOODBYE_SECONDS_OF_FEWER: Final = 1.0
"""The wait after a rank was lost: it never says goodbye, and the others had time to notice the loss."""


@dataclass(frozen=True)
class TorchrunOrder:
    """A job that the first rank orders from the others: its name, its function and the meeting point of the ranks."""

    name: str
    function: str
    meeting: str
    preload: Preload


class Torchrun:
    """The ranks of this command and those on this machine; `rank` is the present one.

    Its variables are removed from the environment, where an engine would use them as its own.
    """

    def __init__(self) -> None:
        names = [name for name in os.environ if name in _REMOVED_VARIABLES or name.startswith(_ELASTIC)]
        variables = {name: os.environ.pop(name) for name in names}
        if os.environ.get(_THREADS) == "1" and int(variables.get("LOCAL_WORLD_SIZE", "1")) > 1:
            del os.environ[_THREADS]  # torchrun's own; ranks share the cores when they compute
        self.rank, self.ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        self.ranks_here = int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]))
        self._local = int(variables.get("LOCAL_RANK", "0")), self.ranks_here
        self._address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        self._hosts = self.rank == 0 and variables.get(f"{_ELASTIC}USE_AGENT_STORE") != "True"
        self._name = f"mismatch-probe/{variables.get(f'{_ELASTIC}RESTART_COUNT', '0')}"
        self._numbers = count()
        self._goodbye_seconds = _GOODBYE_SECONDS
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore(*self._address, is_master=self._hosts, wait_for_workers=False)

    def run(self, job: Job, function: JobFunction, on_message: Callable[[Any], None]) -> Any:
        """On the first rank: run the job, while all other ranks run `function`.

        Raises:
            MismatchProbeError: a rank failed, and all ranks ended.
        """
        number = next(self._numbers)
        host, port = self._address
        meeting = f"tcp:{host}:{port}/{self._name}/{number}"
        order = TorchrunOrder(job.name, name_of(function), meeting, job.preload)
        self._store.set(self._store_key("order", number), json.dumps(vars(order)))

        def watch() -> None:
            key = self._store_key("failed", number)
            if self._store.check([key]):
                raise as_exception(json.loads(self._store.get(key)))

        try:
            return run_together(in_place(job, self._place_of_rank(order)), (), on_message, watch)
        except RankLost:
            self._goodbye_seconds = _GOODBYE_SECONDS_OF_FEWER
            raise

    def follow(self) -> ExitCode:
        """On every other rank: carry out the orders of the first until it ends; only the first prints anything."""
        try:
            for number in self._numbers:
                order = self._receive_order(number)
                if order is None:
                    self._store.add(self._store_key("goodbye"), 1)
                    return ExitCode.PASS
                self._carry_out(order, number)
        except KeyboardInterrupt:
            return ExitCode.TERMINATED
        except RuntimeError:  # how the store says that whoever holds it is gone
            return ExitCode.ENVIRONMENT
        raise AssertionError("orders end with the command")

    def end(self) -> None:
        """On the first rank: end the others; a store in this process stays until they have read that."""
        with suppress(RuntimeError):
            self._store.set(self._store_key("end"), "")
            deadline = time.monotonic() + self._goodbye_seconds
            while time.monotonic() < deadline and self._store.add(self._store_key("goodbye"), 0) < self.ranks - 1:
                time.sleep(_POLL_SECONDS)

    def _receive_order(self, number: int) -> TorchrunOrder | None:
        key = self._store_key("order", number)
        while not self._store.check([key]):
            if self._store.check([self._store_key("end")]):
                return None
            time.sleep(_POLL_SECONDS)
        return TorchrunOrder(**json.loads(self._store.get(key)))

    def _carry_out(self, order: TorchrunOrder, number: int) -> None:
        advice = "use fewer ranks on this machine, or one with more memory"
        job = Job(order.name, function_of(order.function), (), order.preload, advice)
        try:
            start.run(in_place(job, self._place_of_rank(order)))
        except RankLost:
            pass  # whoever is lost, or its parent, says why
        except MismatchProbeError as error:
            self._store.set(self._store_key("failed", number), json.dumps(describe_error(error, order.name)))

    def _place_of_rank(self, order: TorchrunOrder) -> RankPlace:
        return RankPlace(self.rank, self.ranks, *self._local, order.meeting)

    def _store_key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))


_torchrun: Torchrun | None = None


@contextmanager
def join_ranks() -> Iterator[Torchrun | None]:
    """The ranks of this command, where torchrun started it; None elsewhere."""
    global _torchrun
    if not all(name in os.environ for name in _RANK_VARIABLES):
        yield None
        return
    _torchrun = Torchrun()
    try:
        yield _torchrun
    finally:
        if _torchrun.rank == 0:
            _torchrun.end()
        _torchrun = None


def current() -> Torchrun | None:
    """The ranks that torchrun started, inside `join_ranks`; None elsewhere."""
    return _torchrun
