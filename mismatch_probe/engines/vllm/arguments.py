"""What vLLM is given before it starts: engine arguments, environment variables, kernels, its log; and what it cannot do
with any checkpoint.
"""

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Final, get_args

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import COMPUTED_IN, Dtype
from mismatch_probe.engines.vllm.declared import default_arguments, known_arguments
from mismatch_probe.errors import StartRefused, UsageError
from mismatch_probe.reading import Unreadable, parse_json

__all__ = ["default_arguments", "engine_arguments", "known_arguments"]

_DECIDED_ELSEWHERE: Final[dict[str, str]] = {
    "model": "it is set by --model",
    "dtype": "it is set by --dtype or --infer-dtype",
    "revision": "it is set by --revision",
    "trust_remote_code": "it is set by --trust-remote-code",
    "seed": "it is set by --seed",
    **{
        name: f"it is set by engine.{field} in the configuration"
        for name, field in EngineSettings.passed_fields().items()
    },
    "logprobs_mode": "the probabilities compared are those sampled from, so it stays processed_logprobs",
    "max_logprobs": "whole distributions are asked for, so it stays unlimited",
    "generation_config": "a checkpoint's sampling defaults must not slip in, so it stays 'vllm'",
    "worker_extension_cls": "the probe puts its own extension there",
    "enable_lora": "it is set by engine.adapter, the folder of the adapter to serve",
    "max_loras": "one adapter is served, that of engine.adapter",
    "lora_target_modules": "they follow from engine.adapter",
    "max_lora_rank": "it follows from engine.adapter",
    "hf_token": "a run directory keeps its command line, so a secret belongs into the environment (HF_TOKEN)",
    "skip_tokenizer_init": "token texts need the tokenizer",
}
_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((float,), "a number"),
    "str": ((str,), "text"),
}
_CONTAINERS: Final = ("list", "dict", "set", "tuple")
_COUNTS: Final = frozenset(
    {
        "block_size",
        "data_parallel_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "none": None, "null": None}


def own_arguments(engine: EngineSettings) -> dict[str, Any]:
    """The arguments that fields of our own settings are passed as."""
    values = {name: getattr(engine, field) for name, field in EngineSettings.passed_fields().items()}
    return {name: value for name, value in values.items() if value is not None}


def engine_arguments(arguments: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """`arguments` with canonical names and parsed values, ready to be keyword arguments of `vllm.LLM`.

    Raises:
        UsageError: an argument is not among those of `types`, is given twice, is one the probe decides, or has a value
            of another type than vLLM's.
    """
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        name = key.removeprefix("--").removeprefix("vllm.").replace("-", "_")
        if name in _DECIDED_ELSEWHERE:
            raise UsageError(f"--vllm.{name} cannot be given: {_DECIDED_ELSEWHERE[name]}")
        if name not in types:
            matches = get_close_matches(name, types, n=3)
            hint = f"; did you mean {' or '.join(f'--vllm.{match}' for match in matches)}?" if matches else ""
            given_as = "" if key == name else f", given as --vllm.{key}"
            raise UsageError(f"vLLM has no argument {name!r}{given_as}{hint}")
        if name in values:
            raise UsageError(f"--vllm.{name} is given twice")
        values[name] = _value_of_type(name, value, types[name])
        if name in _COUNTS and values[name] is not None and values[name] < 1:
            raise UsageError(f"--vllm.{name} {values[name]} cannot be used; give at least 1")
    return values


def _value_of_type(name: str, value: Any, declaration: str) -> Any:
    """`value` in the type that vLLM declares; of types with names of their own vLLM itself is the judge."""
    kinds = declaration.strip("'\"").split(" | ")
    types = [kind for kind in kinds if kind != "None"]
    result = _read(value, types, is_optional="None" in kinds) if isinstance(value, str) else value
    if "float" in types and "int" not in types and isinstance(result, int) and not isinstance(result, bool):
        result = float(result)
    if (result is None and "None" in kinds) or not all(kind in _KINDS for kind in types):
        return result
    if not any(_is_of(result, kind) for kind in types):
        raise UsageError(f"--vllm.{name} takes {' or '.join(_KINDS[kind][1] for kind in types)}, not {value!r}")
    return result


def _read(text: str, types: list[str], *, is_optional: bool) -> Any:
    """What `text` spells: text itself for an argument that is text, unless it is written as a list or a table."""
    word = _WORDS.get(text.lower(), text)
    if word is None:
        return None if is_optional else text
    is_text = any(kind == "str" or kind.startswith("Literal[") for kind in types)
    if isinstance(word, bool) and ("bool" in types or not is_text):
        return word
    is_container = text.startswith(("[", "{")) and any(kind.startswith(_CONTAINERS) for kind in types)
    if is_text and not is_container:
        return text
    try:
        return parse_json(text)
    except Unreadable:
        return text


def _is_of(value: Any, kind: str) -> bool:
    types, _ = _KINDS[kind]
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


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
    """A single worker, or one of those that torchrun started, runs inside this process; others run in vLLM's own.

    Inside, the engine starts faster and its batches do not depend on the timing of messages.

    Raises:
        UsageError: torchrun's ranks cannot be divided among engines of the size asked for.
    """
    size = _num_workers(args)
    is_external = args.get("distributed_executor_backend") == "external_launcher"
    if is_external and (ranks := int(os.environ.get("WORLD_SIZE", "1"))) % size:
        raise UsageError(
            f"torchrun's {ranks} ranks cannot be divided among engines over {size} ranks each; change "
            "--nproc-per-node, or --vllm.tensor_parallel_size and its like"
        )
    if size == 1 or is_external:
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


_REGISTERS: Final = "register_triton_kernel_overrides"


def register_kernels() -> None:
    """Do what vLLM does at every start of an engine, and have it done with.

    vLLM looks at every name of every module, half a second of processor time in a forked process. A module that is
    imported later finds the kernels in place. Versions that register none stay as they are.
    """
    from vllm.platforms import current_platform

    register = getattr(current_platform, _REGISTERS, None)
    if register is not None:
        register()
        setattr(type(current_platform), _REGISTERS, staticmethod(lambda: None))


def configure_logging() -> None:
    """Do what vLLM does at the start of an engine, which does it again where its variables say otherwise then.

    Python's `dictConfig` looks for every logger at every other, a quarter of a second of processor time. Versions that
    set the log up as they are imported stay as they are.
    """
    try:
        config = import_module("vllm.config.logging").LoggingConfig()
        import_module("vllm.logger").configure_logging_if_needed(config)
    except (ModuleNotFoundError, AttributeError):
        return


SMALLEST_TEMPERATURE: Final = 0.01
"""vLLM raises a lower temperature to this, with nothing but a warning."""
AUTO: Final = "auto"
"""vLLM's word for the format of the model."""
_HEAD_STEP: Final = 32
_BACKENDS: Final = ("distributed_executor_backend", "data_parallel_backend")


def check_limits(dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
    """
    Raises:
        UsageError: vLLM has no such dtype, or would sample from another distribution than the one asked for.
    """
    if not dtype.is_computed_in:
        raise UsageError(f"vLLM cannot run in {dtype}; give --infer-dtype one of {', '.join(COMPUTED_IN)}")
    if sampling.temperature < SMALLEST_TEMPERATURE:
        raise UsageError(
            f"--temperature {sampling.temperature} cannot be used: vLLM would silently sample at "
            f"{SMALLEST_TEMPERATURE}; give at least that"
        )


def require_ray_devices(args: Mapping[str, Any], device_key: str) -> None:
    """device_key: what Ray calls the devices of vLLM's platform; empty where vLLM places none of them by Ray.

    vLLM itself finds that out after it has started Ray and its own process, half a minute later.

    Raises:
        UsageError: the workers are to be placed by Ray, and vLLM cannot do that here.
    """
    for name in _BACKENDS:
        if args.get(name) == "ray" and not device_key:
            raise UsageError(
                f"--vllm.{name} ray cannot be used here: vLLM has Ray place GPUs alone, and there is none; leave it "
                "out for workers on this machine, or start the engine on several by "
                "--vllm.distributed_executor_backend external_launcher"
            )


def check_cpu_states(dtype: Dtype, config: Any) -> None:
    """Refuse gated delta nets in a format that vLLM has no kernel for on a CPU, which it says only while it samples.

    Raises:
        StartRefused: `config`, as `read_config` returns it, has such layers, and `dtype` is not BF16.
    """
    if getattr(config, "linear_num_value_heads", None) and dtype != Dtype.BF16:
        raise StartRefused(
            f"vLLM computes gated delta nets in BF16 alone on a CPU, and not in {dtype.upper()}; measure it on a GPU"
        )


def check_cpu_cache(cache_dtype: str, dtype: Dtype, config: Any) -> None:
    """Refuse a `kv_cache_dtype` of vLLM's that it has no kernel for here; imports vLLM.

    vLLM lets any of its formats through on a CPU, and reads the cache of one that its kernels lack as what it is not:
    log-probs were off by a nat, and no error said so.
    `config` is what `read_config` returns. A name that vLLM does not know is left to vLLM.
    """
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if cache_dtype in get_args(CacheDType) and cache_dtype not in (AUTO, dtype.torch_name):
        formats_of_cpu = [str(name) for name in CPUAttentionBackend.supported_kv_cache_dtypes if name != AUTO]
        require_cpu_cache(
            cache_dtype, formats_of_cpu, head_size=_head_size(config), has_wide_vectors=_has_wide_vectors()
        )


def require_cpu_cache(
    cache_dtype: str, formats_of_cpu: Sequence[str], *, head_size: int | None, has_wide_vectors: bool
) -> None:
    """Refuse a `cache_dtype` that is not among `formats_of_cpu` and the model's own, or that this CPU lacks.

    Raises:
        UsageError: as `check_cpu_cache`.
    """
    flag = f"--vllm.kv_cache_dtype {cache_dtype}"
    if cache_dtype not in formats_of_cpu:
        formats = ", ".join(formats_of_cpu)
        raise UsageError(
            f"{flag} cannot be used on a CPU: vLLM's kernels there read no such cache; leave the flag out for a cache "
            f"in the model's format, or give one of {formats}"
        )
    if not has_wide_vectors:
        raise UsageError(f"{flag} cannot be used on this CPU: vLLM needs AVX-512 or AMX for it; leave the flag out")
    if head_size is not None and head_size % _HEAD_STEP:
        raise UsageError(
            f"{flag} cannot be used with this checkpoint on a CPU: its heads have {head_size} dimensions, and vLLM "
            f"needs a multiple of {_HEAD_STEP}; leave the flag out"
        )


def _head_size(config: Any) -> int | None:
    if head_size := getattr(config, "head_dim", None):
        return int(head_size)
    heads = getattr(config, "num_attention_heads", None)
    return config.hidden_size // heads if isinstance(heads, int) else None


def _has_wide_vectors() -> bool:
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
