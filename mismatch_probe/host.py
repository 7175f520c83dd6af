"""What a process asks of libgomp, glibc, the system and Python's collector, and what is closed at its block's end."""

import ctypes
import gc
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

COMPUTING_VARIABLES: Final = (
    "VLLM_", "OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "OPENBLAS_", "ATEN_", "TORCH", "PYTORCH_", "TRITON_",
    "CUBLAS", "CUDNN_", "NCCL_",
)  # fmt: skip
"""Beginnings of environment variables that tell libraries how to compute."""

_C_LIBRARY: Final = ctypes.CDLL(None)
_THREAD_POLL_SECONDS: Final = 0.001
_SPINS: Final = "10000"
_KERNEL_CACHES: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN's own, and the one PyTorch's bridge to it puts on top."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 256 * 2**20}


def prepare_process() -> None:
    """Call at the start of a process, before torch is imported; a variable that the user has set keeps its value.

    Waiting threads spin for a fraction of a millisecond, then sleep: ones that spin for long starve each other on a
    busy machine, and ones that sleep at once cost scoring up to half of its speed. Freed memory is kept for the next
    tensor: glibc maps and clears large ones anew each time, which takes as long as the arithmetic of a small model.
    Few kernels are kept: oneDNN holds code and memory for each of up to 1024 shapes, and responses of ever new lengths
    are ever new shapes, some 20 MB a training step.
    """
    for name, capacity in _KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    own = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if hasattr(_C_LIBRARY, "mallopt") and not own:
        for parameter, size in _KEPT_BYTES.items():
            _C_LIBRARY.mallopt(parameter, size)


def renew_thread_pool() -> None:
    """Call in a process that was forked where torch had computed, before several threads compute.

    PyTorch replaces the pool of the process before when it is first asked for, and not safely: of several threads at
    once one meets none ("Invalid thread pool!", `caffe2/utils/threadpool/pthreadpool-cpp.cc`).
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


def join_thread(thread: threading.Thread) -> None:
    """Wait for the end of a thread before this process forks.

    `Thread.join` returns while the C library still frees what the thread held. A fork meanwhile copies the locks that
    this takes as they are: held, for ever. The next process that resolves a host name then hangs.
    """
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(_THREAD_POLL_SECONDS)


def release_freed_memory() -> None:
    """Give the system what glibc keeps of freed tensors; it costs the next step some page faults.

    Tensors of ever new sizes leave ever more free blocks between living ones, which glibc never gives back by itself:
    on a CPU 10 to 40 MB a training step.
    """
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


@contextmanager
def no_collections() -> Iterator[None]:
    """Leave Python's collector off inside the block, for what makes many objects and no garbage.

    A tokenizer of 260,000 words is read as a million lists and texts, and collections meanwhile take as long again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Closing(ABC):
    """Closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
