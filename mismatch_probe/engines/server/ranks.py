"""Of several ranks that train with one server, the first asks what need not be asked by all."""

from collections.abc import Callable
from typing import TypeVar

from mismatch_probe.errors import MismatchProbeError

Answer = TypeVar("Answer")


def asked_once(ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives on the first rank, on every rank, when it has it. Where it fails there, every rank raises its
    error.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ask()
    answers: list[Answer | MismatchProbeError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answers = [ask()]
        except MismatchProbeError as error:
            answers = [error]
    dist.broadcast_object_list(answers, src=0)
    [answer] = answers
    if isinstance(answer, MismatchProbeError):
        raise answer
    return answer  # type: ignore[return-value]
