"""New weights for a vLLM server through vLLM's own weight transfer, sent by one rank of several.

NCCL. The server is started for it (docs/servers.md).
"""

import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from mismatch_probe.engines.base import HeldWeight
from mismatch_probe.engines.server.connection import Connection, HttpRequest, Unserved
from mismatch_probe.errors import INSTALL_ENGINES, EngineError, MismatchProbeError, MissingExtra, UsageError, message_of

if TYPE_CHECKING:
    import torch


Result = TypeVar("Result")


def ask_once(ask: Callable[[], Result]) -> Result:
    """What `ask` gives on the first rank, on every rank, when it has it. Where it fails there, every rank raises its
    error.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ask()
    answers: list[Result | MismatchProbeError | None] = [None]
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


NamedWeights = Iterable[tuple[str, "torch.Tensor"]]
Chunk = list[tuple[str, "torch.Tensor"]]

_CHUNK_BYTES: Final = 2**30
"""Memory that one chunk takes besides the weights themselves."""
_ANSWER_BYTES: Final = 2**20
_BYTES_OF_A_HELD_WEIGHT: Final = 4096
"""Its digest, its size, and the names of the tensors that it is made of."""
_HELD: Final = TypeAdapter(list[dict[str, HeldWeight]])
_EXTENSION: Final = "mismatch_probe.engines.vllm.serving.ServedWorker"


class Sender(Protocol):
    """The trainer's side of a vLLM backend."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class WeightTransfer:
    """Of several ranks the first one meets the server and sends; the others wait for it to have met, and go through the
    weights with it, which gathers them.

    says_what_is_held: whether the server reports the digests of its weights.
    """

    def __init__(self, connection: Connection, backend: str, timeout_seconds: float) -> None:
        """
        Raises:
            UsageError: the server takes no weights.
            MissingExtra: vLLM is not installed here.
            EngineError: it fails, or does not meet this process at the backend.
        """
        self._connection = connection
        self._backend = backend
        self._name = f"mismatch-probe-{secrets.token_hex(4)}"
        self._number = 0
        self._workers = 0
        self._chunk: Chunk = []
        self._requests = _ServerRequests(connection)
        self._sender: Sender | None = None
        self.says_what_is_held = ask_once(lambda: self._meet_server(timeout_seconds))

    def send(self, weights: NamedWeights) -> str:
        """Replace the server's weights by those given under the checkpoint's names, and forget what the old ones
        cached; the label that the server gives them.

        Raises:
            EngineError: the server failed, or did not take a tensor.
        """
        self._number += 1
        version = f"{self._name}-{self._number}"
        if self._sender is None:
            deque(weights, maxlen=0)
        else:
            self._send_chunks(self._sender, weights, version)
        return ask_once(lambda: version)

    def version(self) -> str:
        """The label of the weights that the server holds."""
        return str(self._requests.get("/weight_info").get("weight_version"))

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        """As `Engine.held_weights`."""
        return ask_once(lambda: self._held_by_workers(names)) if self.says_what_is_held else []

    def close(self) -> None:
        """Leave the server free for the next trainer, if it still answers."""
        if self._sender is None:
            return
        self._sender.shutdown()
        with suppress(MismatchProbeError):
            self._requests.post("/shutdown_weight_transfer_engine")

    def _send_chunks(self, sender: Sender, weights: NamedWeights, version: str) -> None:
        try:
            for self._chunk in _chunks(weights):
                self._try("sent to", sender.send_weights)
            self._requests.finish(version)
        except BaseException:
            with suppress(MismatchProbeError):
                self._requests.restore()
            raise
        finally:
            self._chunk = []

    def _held_by_workers(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        body = {"method": "probe_held_weights", "args": [list(names)]}
        of_a_worker = sum(_BYTES_OF_A_HELD_WEIGHT + len(name) for name in names)
        answer = self._requests.post("/collective_rpc", body, _ANSWER_BYTES + self._workers * of_a_worker)
        try:
            return _HELD.validate_python(answer["results"])
        except (KeyError, ValidationError) as error:
            raise EngineError(
                f"the server at {self._connection.url} does not say which weights it holds as --worker-extension-cls "
                f"{_EXTENSION} does: start it with this version's"
            ) from error

    def _meet(self, timeout_seconds: float) -> Sender:
        """Both sides of the backend, joined."""
        workers = self._requests.get("/get_world_size").get("world_size")
        if type(workers) is not int or workers < 1:
            raise EngineError(f"the server at {self._connection.url} does not say how many workers it has")
        self._workers = workers
        address = _address_towards(self._connection.url)

        def meet() -> Sender:
            self._requests.restore()
            return _sender(self._backend, self._requests, lambda: self._chunk, address, 1 + workers, timeout_seconds)

        trainer: Sender = self._try(
            "taken by",
            meet,
            f'; it is started with --weight-transfer-config \'{{"backend": "{self._backend}"}}\''
            + (f" and --worker-extension-cls {_EXTENSION}" if self._backend == "gloo" else ""),
        )
        return trainer

    def _meet_server(self, timeout_seconds: float) -> bool:
        """Meet the server, on the first rank, before any rank asks it for tokens; whether it says what it holds."""
        self._sender = self._meet(timeout_seconds)
        try:
            self._requests.post("/collective_rpc", {"method": "probe_held_weights", "args": [[]]})
        except EngineError:
            return False
        return True

    def _try(self, what: str, work: Any, advice: str = "") -> Any:
        try:
            return work()
        except MismatchProbeError as error:
            raise type(error)(f"{error}{advice}") from error
        except Exception as error:
            raise EngineError(
                f"weights cannot be {what} the server at {self._connection.url} over {self._backend} "
                f"({message_of(error)}){advice}"
            ) from error


class _ServerRequests:
    """What vLLM's trainers ask of a server (its `VLLMWeightSyncClient`), once each: none of it can be asked twice.

    A trainer opens and ends an update around every chunk; the server sees one of all chunks. on_failure: called where
    the server does not begin to meet this process, which the trainer may wait for meanwhile.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_open = False
        self.on_failure: Callable[[MismatchProbeError], None] = lambda error: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self.post("/init_weight_transfer_engine", {"init_info": init_info})
        except MismatchProbeError as error:
            self.on_failure(error)
            raise

    def start_weight_update(self) -> None:
        if not self._is_open:
            self.post("/start_weight_update")
        self._is_open = True

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Not yet: another chunk may follow."""

    def finish(self, version: str) -> None:
        """All chunks are there."""
        self._is_open = False
        self.post("/finish_weight_update", {"weight_version": version})
        if self.post("/reset_prefix_cache").get("success") is not True:
            raise EngineError(
                f"the server at {self._connection.url} keeps what its old weights cached: it computes other requests "
                "meanwhile; leave it to this run, and continue with --resume"
            )

    def restore(self) -> None:
        """End what a trainer that was killed, or an update that failed, has left: layers without weights, on which any
        request ends the server. They get back what they had.
        """
        self._is_open = False
        with suppress(EngineError):  # refused where one is open
            self.post("/start_weight_update")
        self.post("/finish_weight_update")
        self.post("/shutdown_weight_transfer_engine")

    def get(self, path: str) -> dict[str, Any]:
        return self._ask_for_json(HttpRequest(path))

    def post(self, path: str, body: dict[str, Any] | None = None, most_bytes: int = _ANSWER_BYTES) -> dict[str, Any]:
        return self._ask_for_json(HttpRequest(path, body or {}, most_bytes=most_bytes))

    def _ask_for_json(self, request: HttpRequest) -> dict[str, Any]:
        try:
            answer = self._connection.ask(request, tries=1)
        except Unserved as error:
            raise UsageError(
                f"the server at {self._connection.url} has no {request.path}, so it takes no weights; start vLLM with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, as docs/servers.md says"
            ) from error
        return answer if isinstance(answer, dict) else {}


def _sender(
    backend: str, client: _ServerRequests, chunk: Any, address: str, world_size: int, timeout_seconds: float
) -> Sender:
    """The trainer's side of a backend, met with the server's.

    Raises:
        MissingExtra: vLLM is not installed here.
    """
    if find_spec("vllm") is None:
        raise MissingExtra(f"vLLM is not installed, and its weight transfer is needed; run {INSTALL_ENGINES}")
    from mismatch_probe.engines.vllm.arguments import prepare_import

    prepare_import()
    from mismatch_probe.engines.vllm.serving import sender

    return sender(backend, client, chunk, address, _free_port(address), world_size, timeout_seconds)


def _chunks(weights: NamedWeights) -> Iterator[Chunk]:
    """Parts of at least one tensor, of `_CHUNK_BYTES` or a little more."""
    chunk: Chunk = []
    size = 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _address_towards(url: str) -> str:
    """This machine's address as the server sees it."""
    host = urlsplit(url).hostname or ""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(place)
        return str(towards.getsockname()[0])


def _free_port(address: str) -> int:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
        return int(listening.getsockname()[1])
