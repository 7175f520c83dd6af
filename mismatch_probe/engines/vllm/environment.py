"""vLLM's environment: defaults set before it starts, never over a variable that is set already."""

import os
from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.dtypes import Dtype

_PARALLEL_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def prepare_import(dtype: Dtype) -> None:
    """Call before vLLM is imported: its log goes to stderr, it sends no usage statistics, and FP32 means FP32.

    Triton's FP32 dot products default to TF32.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if dtype == "fp32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def choose_processes(args: Mapping[str, Any]) -> None:
    """A lone worker, or one beside those that torchrun started, runs inside this process; others in vLLM's own.

    Inside, the engine starts faster and its batches do not depend on the timing of messages.
    """
    alone = all(args.get(size) in (None, 1) for size in _PARALLEL_SIZES)
    if alone or args.get("distributed_executor_backend") == "external_launcher":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
