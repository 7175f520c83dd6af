"""Running out of memory, on a device or the host, told as one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from mismatch_probe.errors import OutOfMemory

_NO_HOST_MEMORY: Final = ("DefaultCPUAllocator", "Cannot allocate memory")
"""PyTorch's allocator, and the system where a file cannot be mapped or a thread be started."""


@contextmanager
def memory_errors_named(doing: str, advice: str) -> Iterator[None]:
    """
    Raises:
        OutOfMemory: whatever is done inside ran out of GPU or host memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(f"out of memory while {doing}; {advice}") from error
    except Exception as error:  # PyTorch, safetensors and Python each raise their own
        if not any(words in str(error) for words in _NO_HOST_MEMORY):
            raise
        raise OutOfMemory(f"out of memory while {doing}; {advice}") from error
