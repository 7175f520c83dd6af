"""Where the processes of an engine meet: under names of their own, and in files that a killed engine does not leave."""

import os
from typing import Any, Final

from mismatch_probe.children.shared_memory import folder_of, own_token

_MEMORY_FILES: Final = hasattr(os, "memfd_create")
_CHOOSES: Final = "get_file_store_init_method"
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
_SHARED: Final = "_CPUSHMDistributed"
_NAMES: Final = "make_group_name"


def meet_without_a_file() -> None:
    """Call once vLLM is imported. vLLM's own meeting place is a file in the temporary folder, which outlives a kill.

    Versions and systems without it keep what they have.
    """
    if not _MEMORY_FILES:
        return
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        if hasattr(module, _CHOOSES):
            setattr(module, _CHOOSES, _in_memory)


def keep_sockets_apart() -> None:
    """Call before an engine is started. The sockets of its processes lie in a folder that goes with the job."""
    folder = folder_of(own_token())
    is_given = os.environ.get(_SOCKETS, str(folder)) != str(folder)
    if is_given or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return
    folder.mkdir(exist_ok=True)
    os.environ[_SOCKETS] = str(folder)


def share_memory_apart() -> None:
    """Call once vLLM is imported. On a CPU it names the memory that its ranks share by the end of their meeting place,
    which is the same in other engines: what one of them left would be taken for this one's.

    Versions that name it otherwise keep what they have.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import cpu_communicator

    shared: Any = getattr(cpu_communicator, _SHARED, None)
    if hasattr(shared, _NAMES) and shared.make_group_name.__module__ != __name__:
        setattr(shared, _NAMES, staticmethod(_named_apart(shared.make_group_name)))


def _named_apart(make_group_name: Any) -> Any:
    from torch import distributed

    token = own_token()

    def named_apart(communicator: Any) -> str:
        tokens = [token]
        distributed.broadcast_object_list(tokens, src=communicator.ranks[0], group=communicator.device_group)
        return f"{tokens[0]}-{make_group_name(communicator)}".replace("/", "")

    return named_apart


def _in_memory() -> str:
    """A file in memory, which this process holds open and its children reach as well."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"
