"""What a fork needs to be the process that an interpreter of its own would be."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from mismatch_probe.children import server
from mismatch_probe.children.servers import Stages
from tests.cores import num_own_cores

THIS_MACHINE: Final = "MISMATCH_PROBE_TEST_MACHINE"
"""The variable that names the file in which servers of vLLM keep what they say of this machine."""
FORKS: Final = "MISMATCH_PROBE_TEST_FORKS"
"""The variable that, set for a command, has the processes of its engines be forks of it."""
_REQUESTS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class ForkedServers:
    """The servers of a command's jobs, forked from the command, which has imported all that they import.

    In a session and with descriptors and signals as `mismatch_probe.children.servers.begin` gives them.
    """

    def __init__(self, stages: Stages) -> None:
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            _serve(stages)

    def poll(self) -> int | None:
        return self._reaped(os.WNOHANG)

    def wait(self) -> int:
        code = self._reaped(0)
        assert code is not None
        return code

    def _reaped(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _serve(stages: Stages) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _REQUESTS:
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        close_all_but(descriptor for descriptor, _ in stages)
        take_threads()
        server.main([list(stage) for stage in stages])
        code = 0
    finally:
        os._exit(code)


def close_all_but(kept: Iterable[int]) -> None:
    """What a new program finds open: the standard streams and those. In the place of all others stands the null device.

    An object of Python's that the fork inherits closes its number at its end, and would close whatever had got the
    number in the meantime.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    others = {int(descriptor.name) for descriptor in Path("/proc/self/fd").iterdir()} - {0, 1, 2, nothing, *kept}
    for descriptor in others:
        with suppress(OSError):
            os.fstat(descriptor)
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def as_server_of_vllm() -> None:
    """Have vLLM's server start and answer for the first time in seconds less of processor, and compute as ever.

    Its processes are forked from this one. The function that ranks tokens, which vLLM compiles in eager servers too,
    runs as Python: it counts, so it gives the same integers.
    """
    fork_processes_of_vllm()
    torch.compiler.set_stance("force_eager")
    if (path := os.environ.get(THIS_MACHINE)) is not None:
        _describe_the_machine_once(Path(path))


def fork_processes_of_vllm() -> None:
    """What vLLM spawns on a CPU is forked from this process, which has imported what each would for 15 seconds."""
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment]


def as_torchrun() -> None:
    """Have torchrun's rendezvous name its own methods without a look at every module, of which there are thousands."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def method_name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = method_name


def _describe_the_machine_once(path: Path) -> None:
    """What a server says of its machine, for which it runs pip and its like, is told by those after the first too."""
    from vllm import collect_env

    collect = collect_env.get_env_info

    def collected() -> Any:
        if path.exists():
            return collect_env.SystemEnv(**json.loads(path.read_text()))
        described = collect()
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(described._asdict()))
        written.replace(path)
        return described

    collect_env.get_env_info = collected


def take_threads() -> None:
    """As torch takes them when it is imported."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", num_own_cores())))
