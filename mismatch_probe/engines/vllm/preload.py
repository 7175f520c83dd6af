"""Imports what a vLLM engine needs before it is started; no device is touched and no thread is left."""

from contextlib import suppress
from importlib import import_module
from typing import Final

from mismatch_probe.engines.vllm.arguments import configure_logging, prepare_import, register_kernels
from mismatch_probe.engines.vllm.declared import known_arguments
from mismatch_probe.errors import EngineError

_LATE_IMPORTS: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank",
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
configure_logging()
with suppress(EngineError):
    known_arguments()
