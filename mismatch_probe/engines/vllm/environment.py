"""vLLM's environment: defaults set before it starts, never over a variable that is set already."""

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

_PARALLEL_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def prepare_import() -> None:
    """Call before vLLM is imported: its log goes to stderr, and it sends no usage statistics."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def keep_fp32_exact(dtype: Dtype) -> None:
    """Call before an engine is started: FP32 means FP32, where Triton's FP32 dot products default to TF32."""
    if dtype == Dtype.FP32:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def choose_processes(args: Mapping[str, Any]) -> None:
    """A lone worker, or one beside those that torchrun started, runs inside this process; others in vLLM's own.

    Inside, the engine starts faster and its batches do not depend on the timing of messages.

    Raises:
        UsageError: torchrun's ranks cannot be divided among engines of the size asked for.
    """
    size = _num_workers(args)
    beside_others = args.get("distributed_executor_backend") == "external_launcher"
    if beside_others and (ranks := int(os.environ.get("WORLD_SIZE", "1"))) % size:
        raise UsageError(
            f"torchrun's {ranks} ranks cannot be divided among engines over {size} ranks each; change "
            "--nproc-per-node, or --vllm.tensor_parallel_size and its like"
        )
    if size == 1 or beside_others:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def divide_cores(args: Mapping[str, Any]) -> None:
    """Call on a CPU: give each of several workers its share of the cores.

    vLLM gives each a NUMA node of its own, and refuses to start where there are fewer.

    Raises:
        UsageError: there are fewer cores than workers.
    """
    workers = _num_workers(args)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if workers <= max(nodes, 1) or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < workers:
        raise UsageError(
            f"{workers} workers cannot share {len(cores)} cores; lower --vllm.tensor_parallel_size and its like"
        )
    shares = (cores[rank * len(cores) // workers : (rank + 1) * len(cores) // workers] for rank in range(workers))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def _num_workers(args: Mapping[str, Any]) -> int:
    return prod(args.get(name) or 1 for name in _PARALLEL_SIZES)
