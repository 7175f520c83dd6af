"""The fork servers of this process: what each imports once, and when it is started."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from mismatch_probe.children import messages
from mismatch_probe.errors import EngineError
from mismatch_probe.host import COMPUTING_VARIABLES

Preload = Literal["training", "engine"]

STAGES: Final[dict[Preload, list[str]]] = {
    "training": [
        "torch",
        "transformers",
        "pandas",
        "mismatch_probe.compare.preflight",
        "transformers.modeling_layers",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "mismatch_probe.training_path.fit:make_table_of_renamed_weights",
        "mismatch_probe.compare.scoring_job",
        "mismatch_probe.compare.run",
    ],
    "engine": ["mismatch_probe.engines.vllm.preload", "mismatch_probe.compare.engine_job"],
}
"""The modules that each fork server imports, and functions, `MODULE:NAME`, that it calls. Each stage imports on top of
the one before, so both servers hold one torch.
"""


_READ_AT_LOAD: Final = (
    *COMPUTING_VARIABLES, "NVIDIA_", "CUDA_", "LRU_CACHE_", "HF_", "TRANSFORMERS_", "PYTHON", "LD_", "MALLOC_",
    "GLIBC_",
)  # fmt: skip
"""Beginnings of variables that a library reads once: with another value it has to be imported anew."""


Stages = list[tuple[int, list[str]]]
"""Of each the descriptor of its socket, and what it imports."""


class BegunServer(Protocol):
    """The process of the first stage, as `subprocess.Popen` shows it."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def begin(stages: Stages) -> BegunServer:
    """An interpreter of its own, which imports what jobs need."""
    return subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe.children.server", json.dumps(stages)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor for descriptor, _ in stages],
        start_new_session=True,
    )


class _Servers:
    """Processes that live as long as this one, one for each stage of imports: they start its jobs."""

    def __init__(self, modules_of_stages: Mapping[Any, list[str]]) -> None:
        self.environment = _read_at_load()
        self._controls: dict[str, socket.socket] = {}
        with ExitStack() as theirs:
            stages: Stages = []
            for name, modules in modules_of_stages.items():
                ours, other = socket.socketpair()
                self._controls[name] = ours
                theirs.enter_context(other)
                stages.append((other.fileno(), modules))
            self._process = begin(stages)

    def send(self, stage: str, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        messages.send(self._controls[stage], content, descriptors)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def serve(self) -> bool:
        """Whether they are there and import what this process would import now."""
        return self.is_running() and self.environment == _read_at_load()

    def close(self) -> None:
        """They end their jobs and themselves when nobody is left to ask for anything."""
        for control in self._controls.values():
            control.close()
        self._process.wait()


_servers: _Servers | None = None
_keeper: _Servers | None = None
_KEEPER: Final = "keeper"
"""The stage of a server that imports nothing and only removes what an engine left, whatever the servers of jobs do."""


@atexit.register
def close_servers() -> None:
    """End the servers and their jobs; a later job gets new ones."""
    global _servers, _keeper
    for running in filter(None, (_servers, _keeper)):
        running.close()
    _servers = _keeper = None


def request(preload: Preload, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Ask the server of a stage of imports for something.

    Raises:
        EngineError: it is gone.
    """
    try:
        _current_servers().send(preload, content, descriptors)
    except OSError as error:
        raise EngineError(
            f"no process can be started for {preload}: the one that starts them is gone; see `mismatch-probe doctor`"
        ) from error


def warm_up(*stages: Preload) -> None:
    """Let the servers of these stages import what jobs need while this process does other things."""
    for stage in stages:
        with suppress(OSError):
            _current_servers().send(stage, {"warm": True})


def keep_scratch(folder: Path) -> None:
    """Have `folder` removed should this process end without doing that itself."""
    request("training", {"scratch": str(folder)})


def keep_engine(token: str, files: Iterable[Path] = ()) -> None:
    """Have what an engine of this process leaves removed should this process end without doing that itself: processes
    that were started with the token, memory and sockets under it, and named memory of libraries, `files`.
    """
    global _keeper
    if _keeper is None or not _keeper.is_running():
        _keeper = _Servers({_KEEPER: []})
    with suppress(OSError):
        _keeper.send(_KEEPER, {"engine": token, "files": [str(file) for file in files]})


def _current_servers() -> _Servers:
    global _servers
    if _servers is not None and not _servers.serve():
        _servers.close()
        _servers = None
    if _servers is None:
        _servers = _Servers(STAGES)
    return _servers


def _read_at_load() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_LOAD)}
