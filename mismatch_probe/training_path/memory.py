"""Running out of memory, on a device or the host, told as one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from mismatch_probe.errors import OutOfMemory

_HOST_ALLOCATOR: Final = "DefaultCPUAllocator"


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
    except RuntimeError as error:
        if _HOST_ALLOCATOR not in str(error):
            raise
        raise OutOfMemory(f"out of memory while {doing}; {advice}") from error
