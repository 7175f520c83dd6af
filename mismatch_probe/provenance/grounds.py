"""What numbers rest on beside settings and checkpoint: packages, hardware, environment variables."""

import os
from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.provenance.keys import content_key

_RECORDED_PREFIXES: Final = (
    "VLLM_", "OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "OPENBLAS_", "ATEN_", "TORCH", "PYTORCH_",
    "TRITON_", "NVIDIA_TF32", "CUDA_VISIBLE", "CUBLAS", "CUDNN_", "NCCL_",
)  # fmt: skip
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


def grounds_keys(
    versions: Mapping[str, Any], hardware: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, str]:
    """The content key of each part of `decisive`."""
    return {name: content_key(part) for name, part in decisive(versions, hardware, environment).items()}
