"""What vLLM cannot do whatever the checkpoint; known without loading it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import COMPUTED_IN, Dtype
from mismatch_probe.errors import UsageError

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


def check_cpu_cache(asked: str, dtype: Dtype, config: Any) -> None:
    """Refuse a `kv_cache_dtype` of vLLM's that it has no kernel for here; imports vLLM.

    vLLM lets any of its formats through on a CPU, and reads the cache of one that its kernels lack as what it is not:
    log-probs were off by a nat, and no error said so.
    `config` is what `read_config` returns. A name that vLLM does not know is left to vLLM.

    Raises:
        UsageError: vLLM does not have it on a CPU, on this one, or for heads of this size.
    """
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if asked in get_args(CacheDType) and asked not in (AUTO, dtype.torch_name):
        supported = [str(name) for name in CPUAttentionBackend.supported_kv_cache_dtypes if name != AUTO]
        require_cpu_cache(asked, supported, head_size=_head_size(config), has_wide_vectors=_has_wide_vectors())


def require_cpu_cache(asked: str, supported: Sequence[str], *, head_size: int | None, has_wide_vectors: bool) -> None:
    """`asked` among the formats `supported` beside the model's own; all of them need AVX-512 or AMX.

    Raises:
        UsageError: as `check_cpu_cache`.
    """
    flag = f"--vllm.kv_cache_dtype {asked}"
    if asked not in supported:
        formats = ", ".join(supported)
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
