"""The process group of the ranks that hold a model: every rank repeats the calls of the first rank."""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from mismatch_probe.children.start import RankPlace
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.errors import RankLost, RoutingUnseen
from mismatch_probe.host import Closing

logger = logging.getLogger(__name__)
T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")
Held = TypeVar("Held", bound=Closing)

_PATIENCE: Final = timedelta(minutes=30)
"""The longest wait for a rank that neither answers nor is lost: loading can take that long."""
_LEAVING_SECONDS: Final = 60.0
_LOST_RANK_MESSAGES: Final = (
    "Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "Socket closed",
    "failed to recv", "failed to send", "remote process exited", "Connection was likely closed", "NCCL error",
    "caused by a remote worker",
)  # fmt: skip


def join(place: RankPlace) -> None:
    """Join the group, and take this rank's share of the processor.

    Objects go over gloo, tensors of a GPU over NCCL.
    """
    backend = _backend(place)
    take_threads(None)
    with lost_ranks_named():
        dist.init_process_group(
            backend, store=_open_store(place), rank=place.rank, world_size=place.ranks, timeout=_PATIENCE
        )
    atexit.register(leave)


def _backend(place: RankPlace) -> str:
    """The backend, with NCCL where this rank has a GPU; the model reports where it lacks one."""
    if not torch.cuda.is_available():
        return "gloo"
    if place.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(place.local_rank)
    return "cpu:gloo,cuda:nccl"


def leave() -> None:
    """Leave the group; where another rank keeps this one waiting too long, continue without leaving."""
    atexit.unregister(leave)
    if not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(_LEAVING_SECONDS)
    if leaving.is_alive():
        logger.warning("another rank did not leave the group within %g s; this one ends without it", _LEAVING_SECONDS)


def take_threads(number: int | None) -> None:
    """Compute with so many threads from now on; None means this rank's share of the processor."""
    share = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(number or max(1, share))


def size() -> int:
    """The number of ranks; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def from_first(message: T | None) -> T:
    """Send a message of the first rank to every rank; the other ranks pass None."""
    if size() == 1:
        return cast(T, message)
    box: list[Any] = [message]
    with lost_ranks_named():
        dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def of_every_rank(own: T) -> list[T]:
    """The messages of all ranks in their order, on every rank."""
    if size() == 1:
        return [own]
    parts: list[Any] = [None] * size()
    with lost_ranks_named():
        dist.all_gather_object(parts, own)
    return parts


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """
    Raises:
        RankLost: the block failed because another rank is lost.
    """
    try:
        yield
    except dist.DistError as error:
        raise _rank_lost(error) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST_RANK_MESSAGES):
            raise
        raise _rank_lost(error) from error


@dataclass(frozen=True)
class _Order:
    """A call that the first rank makes on every rank."""

    method: str
    """A method of what they hold, or one of the names below."""
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None


_LOAD: Final = "load"
_CLOSE: Final = "close"
_END: Final = "end"


class HeldByRanks(Closing, Generic[Held]):
    """An engine or a scorer that ranks hold together, on the first rank; the others are in `follow_first`.

    All must have joined the group.
    """

    def __init__(self, load: Callable[..., Held], *arguments: Any, **keywords: Any) -> None:
        from_first(_Order(_LOAD, arguments, keywords))
        self._model = load(*arguments, **keywords)

    def __exit__(self, *error: object) -> None:
        """Close, but not after a failure: other ranks may be in the middle of an order, and end with this rank."""
        if error[0] is None:
            self.close()

    def close(self) -> None:
        from_first(_Order(_CLOSE))
        self._model.close()

    def _on_every_rank(self, method: str, *arguments: Any) -> Any:
        from_first(_Order(method, arguments))
        with lost_ranks_named():
            return getattr(self._model, method)(*arguments)


def follow_first(place: RankPlace, load: Callable[..., Held], *, ends_with_close: bool) -> None:
    """Join, and repeat the first rank's calls to a `HeldByRanks` until it calls `dismiss`; every other rank runs this.

    ends_with_close: closing takes the group down, so nothing is said after it.
    """
    join(place)
    model: Held | None = None
    while (order := _next_order()).method != _END:
        if order.method == _LOAD:
            model = load(*order.arguments, **(order.keywords or {}))
            continue
        assert model is not None, "the first order loads"
        if order.method == _CLOSE:
            model.close()
            model = None
            if ends_with_close:
                return
        else:
            with lost_ranks_named(), suppress(RoutingUnseen):  # the first one meets it too, and continues
                getattr(model, order.method)(*order.arguments)
    leave()


def dismiss() -> None:
    """End `follow_first` on the other ranks, and leave the group."""
    from_first(_Order(_END))
    leave()


def _next_order() -> _Order:
    order: _Order | None = from_first(None)
    assert order is not None
    return order


def _rank_lost(error: BaseException) -> RankLost:
    return RankLost(
        f"another rank that holds a part of the model is gone or does not answer ({str(error).splitlines()[0]}); "
        "see the logs of the ranks, then continue with --resume"
    )


def _open_store(place: RankPlace) -> Store:
    kind, _, where = place.meeting.partition(":")
    if kind == "file":
        store = FileStore(where, place.ranks)
        store.set_timeout(_PATIENCE)
        return store
    address, _, name = where.partition("/")
    host, _, port = address.rpartition(":")
    return PrefixStore(name, TCPStore(host, int(port), is_master=False, timeout=_PATIENCE))


@dataclass(frozen=True)
class Shares:
    """This rank's share of the passes; ranks that divide a product have the same one.

    The passes are planned from the sequences alone, so that the number of ranks changes no number.
    """

    number: int
    of: int

    @classmethod
    def of_settings(cls, settings: TrainingPathSettings) -> Self:
        """The share of this rank; ranks that divide a product are neighbours, as in transformers."""
        return cls(rank() // settings.tensor_parallel, size() // settings.tensor_parallel)

    def map_shared(self, items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
        """The results of `work` for every item, in order, on every rank.

        Every rank works equally often, since a forward pass gathers weights from all ranks: one without an item repeats
        the first item.
        """
        if not items:
            return []
        rounds = -(-len(items) // self.of)
        mine = [number * self.of + self.number for number in range(rounds)]
        with lost_ranks_named():
            own = {index: work(items[index if index < len(items) else 0]) for index in mine}
        everyone = {index: result for part in of_every_rank(own) for index, result in part.items()}
        return [everyone[index] for index in range(len(items))]
