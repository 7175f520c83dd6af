"""The memory that a process can still take, and one sentence where it runs out."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import torch

from mismatch_probe.errors import OutOfMemory

_NO_HOST_MEMORY: Final = ("DefaultCPUAllocator", "Cannot allocate memory")
"""Words of PyTorch's allocator, and of the system where it cannot map a file or start a thread."""


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


_GROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:"))
"""The limits of `ulimit -v` and `ulimit -d`, and the fields in which Linux shows how much of each is in use."""


def free_memory(device: torch.device) -> int:
    """The free bytes: on a GPU by its driver, on the host the smallest rest of any limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *_left_by_limits(), *_left_by_groups(_own_groups())]))


def _left_by_limits() -> Iterator[int]:
    own_bytes = _process_bytes()
    for kind, field in _LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and field in own_bytes:
            yield limit - own_bytes[field]


def _process_bytes() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}


def _own_groups() -> list[Path]:
    """The folders of this process's memory groups and all above them, of both versions of the interface."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = _GROUPS / "memory" if kinds else _GROUPS
        own = top / path.lstrip("/")
        folders += [top, *(folder for folder in (own, *own.parents) if top in folder.parents)]
    return folders


def _left_by_groups(folders: list[Path]) -> Iterator[int]:
    """The bytes left by each group with a limit; cached files count as free, since they give way to others."""
    for folder in folders:
        for limit_name, taken_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _bytes_in_file(folder / limit_name), _bytes_in_file(folder / taken_name)
            if limit is not None and usage is not None:
                yield limit - usage + _cached_bytes(folder / "memory.stat", cached_name)


def _bytes_in_file(path: Path) -> int | None:
    """The number in a file; None where there is no file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(name, 0))
