"""Jobs that hold one model together: one process a rank, which end together.

A rank's `Place` says which it is and where they meet. The variables are torchrun's, which libraries read too.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, cast

from mismatch_probe.children.servers import keep_scratch
from mismatch_probe.children.start import Job, Process, running
from mismatch_probe.errors import RankLost

logger = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 1.0
_CAUSE_SECONDS: Final = 5.0
"""How long the process whose loss another one reports is given to say why it ended, or to be seen dead."""
_LEAVING_SECONDS: Final = 60.0
"""How long the others are given to end once the first one is done."""


@dataclass(frozen=True)
class Place:
    """rank: of `ranks` processes. local_rank: of the `local_ranks` on this machine, and so its GPU.

    meeting: where they find each other: `file:PATH` on one machine, `tcp:HOST:PORT/NAME` in torchrun's store.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    meeting: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


@contextmanager
def places_here(ranks: int) -> Iterator[list[Place]]:
    """So many places on this machine, for as long as the body runs."""
    with TemporaryDirectory(prefix="mismatch-probe-ranks-") as folder:
        keep_scratch(Path(folder))
        meeting = f"file:{Path(folder) / 'meeting'}"
        yield [Place(rank, ranks, rank, ranks, meeting) for rank in range(ranks)]


def in_place(job: Job, place: Place) -> Job:
    """The job as the process of a rank; the place is its function's last argument."""
    name = job.name if place.rank == 0 else f"rank {place.rank} of {job.name}"
    arguments = (*job.arguments, place.to_json())
    return replace(job, name=name, arguments=arguments, environment={**job.environment, **place.environment})


def run_together(
    first: Job,
    others: Sequence[Job],
    on_message: Callable[[Any], None],
    watch: Callable[[], None] | None = None,
) -> Any:
    """Run jobs that need each other, and return what the first one's function returned.

    Where one fails all end, with the failure of the one that did not only lose another. `watch` is called every second,
    and all end with what it raises. One that hangs once the first is done is ended with a warning: nothing is missing.

    Raises:
        MismatchProbeError: that failure.
        KeyboardInterrupt: the user interrupted; all are ended first.
    """
    with ExitStack() as stack, DefaultSelector() as selector:
        processes = [stack.enter_context(running(job)) for job in (first, *others)]
        for process in processes:
            selector.register(process, EVENT_READ)
        answers: list[Any] = []
        lost: RankLost | None = None
        patience = inf
        while selector.get_map() and time.monotonic() < patience:
            for key, _ in selector.select(_WATCH_SECONDS):
                process = cast(Process, key.fileobj)
                if process.hear(on_message if process is processes[0] else _unheard):
                    continue
                selector.unregister(process)
                try:
                    answer = process.outcome()
                except RankLost as error:
                    lost = lost or error
                    patience = min(patience, time.monotonic() + _CAUSE_SECONDS)
                else:
                    if process is processes[0]:
                        answers.append(answer)
                        patience = min(patience, time.monotonic() + _LEAVING_SECONDS)
            if watch is not None:
                watch()
        while lost is not None and watch is not None and time.monotonic() < patience:
            time.sleep(_WATCH_SECONDS)
            watch()
        if lost is not None:
            raise lost
        if hanging := len(selector.get_map()):
            logger.warning(
                "%d of the %d ranks of %s did not end within %g s after the first one was done, and were ended",
                *(hanging, len(processes), first.name, _LEAVING_SECONDS),
            )
        return answers[0]


def _unheard(message: Any) -> None:
    """Only the first rank tells how far they are."""
