"""Imports what a vLLM engine needs before it is started; no device is touched and no thread is left."""

from importlib import import_module
from typing import Final

from mismatch_probe.engines.vllm.environment import prepare_import
from mismatch_probe.engines.vllm.kernels import register_kernels

_LATE_IMPORTS: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "mismatch_probe.engines.vllm.engine",
    "mismatch_probe.engines.vllm.worker",
)
"""What is imported when an engine starts; a version of vLLM that lacks one of them imports it then."""

prepare_import()
import_module("vllm")
for _name in _LATE_IMPORTS:
    try:
        import_module(_name)
    except ModuleNotFoundError as error:
        if error.name != _name:
            raise
register_kernels()
