"""Several passes at once on a CPU: streams, each a thread with its share of the processor's threads.

Within one pass every operation waits for its slowest thread, hundreds of times a second for a small model; streams wait
for each other once a batch. What a pass computes depends on its own rows and on how many threads a stream has, never on
which stream takes it or when.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final, TypeVar

import torch
from transformers import PreTrainedModel

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_STREAMS: Final = 8
"""More would wait for each other in Python."""


def most_streams() -> int:
    """How many passes are computed at once where there are so many."""
    return min(torch.get_num_threads(), _MOST_STREAMS)


def in_streams(
    model: PreTrainedModel,
    items: Sequence[Item],
    work: Callable[[PreTrainedModel, Item], Result],
    common: Iterable[torch.nn.Module] = (),
) -> list[Result]:
    """`work(model, item)` of each item, in order; raises what `work` raises.

    Item i goes to stream i modulo their number. Every stream but the first has a copy of `model` that shares its
    weights, made for this call, so that a forward that keeps something in its modules keeps it to itself. The modules
    in `common` are not copied.
    """
    num_threads = torch.get_num_threads()
    num_streams = min(most_streams(), len(items))
    if num_streams <= 1:
        return [work(model, item) for item in items]
    models = [model, *(_sharing_weights(model, common) for _ in range(num_streams - 1))]

    def stream(number: int) -> list[Result]:
        torch.set_num_threads(num_threads // num_streams)
        return [work(models[number], item) for item in items[number::num_streams]]

    try:
        with ThreadPoolExecutor(num_streams) as pool:
            shares = list(pool.map(stream, range(num_streams)))
    finally:
        torch.set_num_threads(num_threads)
    return [shares[index % num_streams][index // num_streams] for index in range(len(items))]


def _sharing_weights(model: PreTrainedModel, common: Iterable[torch.nn.Module]) -> PreTrainedModel:
    shared: dict[int, object] = {id(kept): kept for kept in chain(model.parameters(), model.buffers(), common)}
    return copy.deepcopy(model, shared)
