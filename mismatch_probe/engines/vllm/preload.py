"""Imports what a vLLM engine needs before it is started; no device is touched and no thread is left."""

from importlib import import_module
from typing import Final

from mismatch_probe.engines.vllm.environment import prepare_import

_LATE_IMPORTS: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
)
"""What vLLM imports when an engine starts; a version that lacks one of them imports it then."""

prepare_import()
import_module("vllm")
for _name in _LATE_IMPORTS:
    try:
        import_module(_name)
    except ModuleNotFoundError as error:
        if error.name != _name:
            raise
