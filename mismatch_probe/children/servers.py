"""The fork servers of this process: what each imports once, and when it is started."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
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
        "mismatch_probe.training_path.preload",
        "mismatch_probe.training_path.fit",
        "mismatch_probe.compare.scoring_job",
        "mismatch_probe.compare.run",
    ],
    "engine": ["mismatch_probe.engines.vllm.preload", "mismatch_probe.compare.engine_job"],
}
"""The modules that each fork server imports. Each stage imports on top of the one before, so both servers hold one
torch.
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
    """The processes that start this one's jobs, one for each stage of imports."""

    def __init__(self) -> None:
        self.environment = _read_at_load()
        self._controls: dict[Preload, socket.socket] = {}
        with ExitStack() as theirs:
            stages: Stages = []
            for name, modules in STAGES.items():
                ours, other = socket.socketpair()
                self._controls[name] = ours
                theirs.enter_context(other)
                stages.append((other.fileno(), modules))
            self._process = begin(stages)

    def send(self, preload: Preload, content: dict[str, Any], descriptors: Sequence[int]) -> None:
        messages.send(self._controls[preload], content, descriptors)

    def serve(self) -> bool:
        """Whether they are there and import what this process would import now."""
        return self._process.poll() is None and self.environment == _read_at_load()

    def close(self) -> None:
        """They end their jobs and themselves when nobody is left to ask for anything."""
        for control in self._controls.values():
            control.close()
        self._process.wait()


_servers: _Servers | None = None


@atexit.register
def close_servers() -> None:
    """End the servers and their jobs; a later job gets new ones."""
    global _servers
    if _servers is not None:
        _servers.close()
        _servers = None


def request(preload: Preload, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Ask the server of a stage of imports for something.

    Raises:
        EngineError: it is gone.
    """
    try:
        _current_servers().send(preload, content, descriptors)
    except OSError as error:
        raise EngineError(
            f"no process can be started for {preload}: the one that starts them is gone; see mismatch-probe doctor"
        ) from error


def warm_up(*stages: Preload) -> None:
    """Let the servers of these stages import what jobs need while this process does other things."""
    for stage in stages:
        with suppress(OSError):
            _current_servers().send(stage, {"warm": True}, ())


def keep_scratch(folder: Path) -> None:
    """Have `folder` removed should this process end without doing that itself."""
    request("training", {"scratch": str(folder)})


def _current_servers() -> _Servers:
    global _servers
    if _servers is not None and not _servers.serve():
        close_servers()
    if _servers is None:
        _servers = _Servers()
    return _servers


def _read_at_load() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_LOAD)}
