"""Where the processes of an engine meet: a file without a name, so that a killed engine leaves none."""

import os
from typing import Final

_MEMORY_FILES: Final = hasattr(os, "memfd_create")
_CHOOSES: Final = "get_file_store_init_method"


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


def _in_memory() -> str:
    """A file in memory, which this process holds open and its children reach as well."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"
