"""The trainer's side of vLLM's weight transfer."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from mismatch_probe.engines.vllm.arguments import prepare_import

prepare_import()

import torch  # noqa: E402
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402

from mismatch_probe.engines.vllm.weight_transfer import (  # noqa: E402
    AbandonableThread,
    GlooTrainerInitInfo,
)

Pairs = list[tuple[str, torch.Tensor]]

_AFTER_ITS_REQUEST_SECONDS: Final = 5.0
"""A meeting begins with a request to the server, which has a limit of its own: what that says is told first."""


class _Pairs(WeightSource):
    """Whatever the chunk is now."""

    def __init__(self, now: Callable[[], Pairs]) -> None:
        self._now = now

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._now()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._now())


def sender(
    backend: str,
    client: Any,
    chunk: Callable[[], Pairs],
    address: str,
    port: int,
    world_size: int,
    timeout_seconds: float,
) -> TrainerWeightTransferEngine[Any]:
    """The backend's trainer, joined with the workers of the server that `client` asks; it sends what `chunk` gives.

    world_size: this process and all workers. address, port: where they meet, within `timeout_seconds` of the request
    that asks the server to.

    Raises:
        TimeoutError: they do not.
        Exception: what `client` raises, or the backend.
    """
    met: TrainerInitInfo
    if backend == "gloo":
        met = GlooTrainerInitInfo(address, port, world_size, timeout_seconds, rank=0)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        met = NCCLTrainerInitInfo(address, port, world_size, rank=0)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def meet() -> TrainerWeightTransferEngine[Any]:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first one
        return WeightTransferTrainerFactory.trainer_init(met, client=client, source=_Pairs(chunk))

    meeting = AbandonableThread(meet)
    client.on_failure = meeting.fail  # NCCL waits for workers that were never asked
    try:
        return meeting.result(timeout_seconds + _AFTER_ITS_REQUEST_SECONDS)
    except (TimeoutError, torch.distributed.DistStoreError) as error:
        raise TimeoutError(
            f"its workers did not come to {address}:{port} within {timeout_seconds:g} s: see that its machine reaches "
            "this address and port"
        ) from error
