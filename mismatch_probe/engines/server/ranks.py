"""Of several ranks that train with one server, the first asks what need not be asked by all."""

from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def is_first() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def asked_once(ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives on the first rank, on every rank, when it has it."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ask()
    answers: list[Answer | None] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answers, src=0)
    [answer] = answers
    return answer  # type: ignore[return-value]
