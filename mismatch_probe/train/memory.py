"""What a process that trains for days must not pile up."""

import ctypes
import os
from typing import Final

_C_LIBRARY: Final = ctypes.CDLL(None)


def bound_kernel_caches() -> None:
    """Call before the first product: oneDNN keeps code and memory for each shape it meets, up to 1024 of them.

    Responses of ever new lengths are ever new shapes: on a CPU some 20 MB a step.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def release_freed_memory() -> None:
    """Give the system what glibc keeps of freed tensors; it costs the next step some page faults.

    Tensors of ever new sizes leave ever more free blocks between living ones, which glibc never gives back by itself:
    on a CPU 10 to 40 MB a step.
    """
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)
