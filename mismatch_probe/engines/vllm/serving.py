"""What a vLLM server is extended by so that `train` can send it weights and compare what it then holds.

    VLLM_SERVER_DEV_MODE=1 vllm serve M --enable-scale-out --weight-transfer-config '{"backend": "gloo"}' \
        --worker-extension-cls mismatch_probe.engines.vllm.serving.ServedWorker

`gloo` is a backend of vLLM's weight transfer: as its `nccl`, but over TCP, so that CPUs take part. vLLM knows both
sides of a transfer by the backend's name: the trainer's, made by `WeightTransferTrainerFactory`, and that of each of a
server's workers, made by `WeightTransferEngineFactory`. Importing this module registers both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from mismatch_probe.engines.vllm.worker_weights import HeldWeights, pack_again

Result = TypeVar("Result")


class AbandonableThread(Generic[Result]):
    """What blocks in a collective cannot be ended; where its other end never comes, the thread is left behind."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._outcomes: SimpleQueue[tuple[Result, None] | tuple[None, BaseException]] = SimpleQueue()
        Thread(target=self._keep_outcome, daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Have `result` raise this, if nothing is known before."""
        self._outcomes.put((None, error))

    def result(self, seconds: float | None = None) -> Result:
        """What the work gave, or raises what it raised.

        Raises:
            TimeoutError: neither within so many seconds.
        """
        try:
            result, error = self._outcomes.get(timeout=seconds)
        except Empty as error:
            raise TimeoutError(f"nothing within {seconds:g} s") from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _keep_outcome(self) -> None:
        try:
            self._outcomes.put((self._work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._outcomes.put((None, error))


BACKEND: Final = "gloo"


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the trainer, rank 0 of `world_size`, waits for the workers, and for how long."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The same for a worker; workers have the ranks from 1 on."""

    master_address: str
    master_port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is sent, in order, by the checkpoint's names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's side."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: Any = None  # a ProcessGroupGloo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = join_group(init_info, rank=1 + own)

    def start_weight_update(self) -> None:
        _reloading().initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, which ends by waiting for an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("the transfer was not initialised: call init_weight_transfer_engine first")
        model: Any = self.model
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            _broadcast(self._group, weight)
            model.load_weights([(name, weight.to(self.device))])

    def finish_weight_update(self) -> None:
        _reloading().finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_again(self.model)

    def shutdown(self) -> None:
        self._group = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side. Ranks other than the first only go through the weights, which gathers them."""

    init_info_cls = GlooTrainerInitInfo

    _group: Any = None  # a ProcessGroupGloo

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            info = GlooInitInfo(
                init_info.master_address, init_info.master_port, init_info.world_size, init_info.timeout_seconds
            )
            joining = AbandonableThread(lambda: join_group(info, rank=0))
            client.init_weight_transfer_engine(asdict(info))
            engine._group = joining.result()
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        metadata = self.source.metadata()
        update = GlooUpdateInfo(
            names=[weight.name for weight in metadata],
            dtype_names=[str(weight.dtype).removeprefix("torch.") for weight in metadata],
            shapes=[list(weight.shape) for weight in metadata],
        )
        self.client.start_weight_update()
        sending = AbandonableThread(lambda: self._send_tensors([tensor for _, tensor in self.source or ()]))
        self.client.update_weights(asdict(update))
        sending.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self._group = None

    def _send_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        for tensor in tensors:
            _broadcast(self._group, tensor.detach().cpu().contiguous())


def _reloading() -> Any:
    """vLLM's functions that begin and end a reload of a model's layers."""
    return import_module("vllm.model_executor.model_loader.reload")


def join_group(place: GlooInitInfo, rank: int) -> ProcessGroupGloo:
    """The group, once all are there. The first rank keeps the store itself, also where it is torchrun's process, which
    would look for one that torchrun keeps.
    """
    address, port, timeout = place.master_address, place.master_port, timedelta(seconds=place.timeout_seconds)
    store = TCPStore(address, port, place.world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    return ProcessGroupGloo(store, rank, place.world_size, timeout)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerWeightTransferEngine)


Pairs = list[tuple[str, torch.Tensor]]

_AFTER_ITS_REQUEST_SECONDS: Final = 5.0
"""A meeting begins with a request to the server, which has a limit of its own: its error is raised first."""


class _Pairs(WeightSource):
    """Whatever the chunk is now."""

    def __init__(self, pairs: Callable[[], Pairs]) -> None:
        self._pairs_of_chunk = pairs

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs_of_chunk()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs_of_chunk())


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
    info: TrainerInitInfo
    if backend == "gloo":
        info = GlooTrainerInitInfo(address, port, world_size, timeout_seconds, rank=0)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(address, port, world_size, rank=0)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def meet() -> TrainerWeightTransferEngine[Any]:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first one
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=_Pairs(chunk))

    meeting = AbandonableThread(meet)
    client.on_failure = meeting.fail  # NCCL waits for workers that were never asked
    try:
        return meeting.result(timeout_seconds + _AFTER_ITS_REQUEST_SECONDS)
    except (TimeoutError, torch.distributed.DistStoreError) as error:
        raise TimeoutError(
            f"its workers did not come to {address}:{port} within {timeout_seconds:g} s: see that its machine reaches "
            "this address and port"
        ) from error


class ServedWorker(HeldWeights):
    """Methods vLLM mixes into a server's worker class, called over `/collective_rpc`."""

    device: Any

    def probe_repack(self) -> None:
        """Pack again for a CPU what `reload_weights` leaves out."""
        if torch.device(self.device).type == "cpu":
            pack_again(self.get_model())
