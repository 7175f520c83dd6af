"""The operations of a checkpoint's forward pass, counted by PyTorch, and this machine's rates of such work.

Each takes about a second, in a job. The weights of the timing share one small buffer, so a large checkpoint takes no
more memory than a small one.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.fit import require_sane
from mismatch_probe.training_path.loading import choose_device, load_config, maker_of
from mismatch_probe.training_path.memory import free_memory, memory_errors_named

_COUNTED_TOKENS: Final = (64, 128)
"""The lengths of the two passes: they separate work that grows with the length from work with its square."""
_SECONDS: Final = 0.06
"""The duration of each measurement, after a warm-up."""
_TOKENS: Final = {"cpu": 512, "cuda": 4096}
_FEWEST_TOKENS: Final = 64
_FLOPS: Final = {"cpu": 1e10, "cuda": 1e13}
"""The most operations of one call: fewer tokens of a wide model show as much."""
_ATTENTION_TOKENS: Final = 512
_MOST_WEIGHTS: Final = 2**25
"""The most elements of a weight of the timing; wider matrices are no faster."""
_READ_BYTES: Final = 2**27
_DISK_BYTES: Final = 2**26
_DISK_CHUNK_BYTES: Final = 2**22
_SMALL_OPERATIONS: Final = 200


def count(folders: Sequence[str], trust_remote_code: bool) -> dict[str, Any]:
    """The values of a `compare.cost.roofline.Architecture` for each folder; or why one is `unknown`, and nothing else:
    an engine may take a checkpoint that transformers does not.
    """
    architectures = []
    try:
        for folder in map(Path, folders):
            config = load_config(folder, trust_remote_code=trust_remote_code)
            num_stored = sum(len(safetensors_header(path)) for path in weight_files(folder))
            require_sane(folder, config.get_text_config(), num_stored)
            architectures.append(count_forward(config, trust_remote_code=trust_remote_code))
    except (Uncountable, UsageError) as why:
        return {"unknown": str(why), "architectures": []}
    return {"unknown": "", "architectures": architectures}


class Uncountable(Exception):  # noqa: N818 - an answer: there is no estimate
    """Why a model's operations cannot be counted."""


def count_forward(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """A model's sizes, and the operations of its forward pass by PyTorch's FLOP counter on empty weights.

    Raises:
        Uncountable: the weights are quantised, the config lacks a size, or the model does not compute without weights.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise Uncountable("the weights are quantised, and what their kernels take is not known here")
    text = config.get_text_config()
    hidden_size, vocab_size = _size(text, "hidden_size"), _size(text, "vocab_size")
    num_heads = _size(text, "num_attention_heads")
    experts_width = getattr(text, "moe_intermediate_size", None)
    intermediate_size = experts_width or getattr(text, "intermediate_size", None) or 4 * hidden_size
    try:
        model = _empty_model(config, trust_remote_code=trust_remote_code)
        short, long = _COUNTED_TOKENS
        short_flops, long_flops = (_flops(model, tokens) / tokens for tokens in _COUNTED_TOKENS)
    except Exception as error:  # a model that reads its weights to decide what it computes raises what it meets
        raise Uncountable(f"the forward pass of {config.model_type} cannot be counted ({message_of(error)})") from error
    pair_flops = max(0.0, (long_flops - short_flops) / (long - short))
    head = model.get_output_embeddings()
    head_flops = 2 * (hidden_size * vocab_size if head is None else head.weight.numel())
    parts = _parameters_by_layer(model)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size * (getattr(text, "num_experts_per_tok", None) or 1),
        "num_layers": _size(text, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(text, "head_dim", None) or hidden_size // num_heads,
        "vocab_size": vocab_size,
        "parameters": sum(parts.values()),
        "layer_parameters": max((size for layer, size in parts.items() if layer is not None), default=0),
        "outside_parameters": parts[None],
        "token_flops": short_flops - pair_flops * short - head_flops,
        "pair_flops": pair_flops,
        "head_flops": head_flops,
        **_window(text),
    }


def _window(config: PreTrainedConfig) -> dict[str, Any]:
    """The sliding window, and the share of the layers with attention that have it, each taken for one of the others.

    A config that names a window and no kinds of layers has it in all of them (Mistral, Phi-3).
    """
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or not getattr(config, "use_sliding_window", True):
        return {}
    kinds = Counter(getattr(config, "layer_types", None) or ["sliding_attention"])
    in_window, full = kinds["sliding_attention"], kinds["full_attention"]
    return {"window": window, "windowed_share": in_window / (in_window + full)} if in_window else {}


def _size(config: PreTrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if type(value) is not int or value < 1:
        raise Uncountable(f"config.json does not say {name}")
    return value


def _empty_model(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model without memory; its experts compute as many tokens as are routed to them."""
    with torch.device("meta"):
        model: PreTrainedModel = maker_of(config).from_config(config, trust_remote_code=trust_remote_code)
    model.set_experts_implementation("batched_mm")
    model.eval()
    return model


def _flops(model: PreTrainedModel, tokens: int) -> int:
    """The operations for a sequence. Attention counts all pairs, as PyTorch counts a fused kernel."""
    ids_BS = torch.ones((1, tokens), dtype=torch.long, device="meta")
    mask_BHSS = torch.zeros((1, 1, tokens, tokens), device="meta")
    try:
        return _flops_of_call(model, input_ids=ids_BS, attention_mask=mask_BHSS, use_cache=False)
    except (RuntimeError, TypeError, ValueError):  # it makes a mask of its own, and reads it: this is slower
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _flops_of_call(model, input_ids=ids_BS, use_cache=False)


def _flops_of_call(model: PreTrainedModel, **inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    total: int = counter.get_total_flops()
    return total


def _parameters_by_layer(model: PreTrainedModel) -> Counter[int | None]:
    """The parameters of each layer by its number; None is the number of those outside the layers."""
    parts: Counter[int | None] = Counter()
    for name, parameter in model.named_parameters():
        parts[next((int(part) for part in name.split(".") if part.isdecimal()), None)] += parameter.numel()
    return parts


def measure(
    sizes: Mapping[str, Any], kinds: Sequence[tuple[str, str]], training_device: str, folder: str
) -> dict[str, Any]:
    """The values of a `compare.cost.roofline.Calibration` with rates for each process (`engine`, `training`) and dtype.

    sizes: of the checkpoint in the folder, as `count` gives them; the largest of its files is read from disk.
    """
    with memory_errors_named("measuring how fast this machine is", "free some and try again"):
        return _measure_kinds(sizes, kinds, training_device, Path(folder))


def _measure_kinds(
    sizes: Mapping[str, Any], kinds: Sequence[tuple[str, str]], training_device: str, folder: Path
) -> dict[str, Any]:
    devices = {
        "training": choose_device(training_device),
        "engine": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    }
    reads = {device: _read_bytes_per_second(device) for device in dict.fromkeys(devices.values())}
    largest = max(weight_files(folder), key=lambda path: path.stat().st_size)
    from_disk = _disk_bytes_per_second(largest)
    rates = []
    for process, name in kinds:
        dtype, device = Dtype.parse(name), devices[process]
        rates.append(
            {
                "process": process,
                "dtype": dtype,
                "device": str(device),
                "memory_bytes_per_second": reads[device],
                "disk_bytes_per_second": from_disk,
                **_rates(process, dtype, device, sizes),
            }
        )
    return {
        "rates": rates,
        "device_memory_bytes": {str(device): _memory_bytes(device) for device in reads},
        "free_memory_bytes": {str(device): free_memory(device) for device in {*reads, torch.device("cpu")}},
    }


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _rates(process: str, dtype: Dtype, device: torch.device, sizes: Mapping[str, Any]) -> dict[str, float]:
    with _arithmetic(process, dtype, device):
        return {
            "matrix_flops_per_second": _layer_flops_per_second(process, sizes, torch_dtype(dtype), device),
            "attention_flops_per_second": _attention_flops_per_second(sizes, torch_dtype(dtype), device),
            "operation_seconds": _operation_seconds(torch_dtype(dtype), device),
        }


@contextmanager
def _arithmetic(process: str, dtype: Dtype, device: torch.device) -> Iterator[None]:
    """Enter the training path's arithmetic; an engine has its own kernels, and its FP32 is true FP32 as well."""
    arithmetic = Arithmetic(dtype, device.type, None, is_reference=dtype.can_be_reference)
    if process == "training":
        with arithmetic.active():
            yield
    else:
        with arithmetic.flags_set(), torch.no_grad():
            yield


def _layer_flops_per_second(process: str, sizes: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> float:
    """The rate of a layer without its attention; its element-wise operations count in the time alone.

    An engine fuses norms and rotary positions with other operations, so they are left out for it.
    """
    norm, rotate = (_apply_norm, _apply_rotation) if process == "training" else (_identity, _identity)
    hidden_size: int = sizes["hidden_size"]
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("num_heads", "num_kv_heads"))
    intermediate: int = min(sizes["intermediate_size"], max(hidden_size, _MOST_WEIGHTS // hidden_size))
    shapes = [
        (hidden_size, queries + 2 * keys),
        (queries, hidden_size),
        (hidden_size, 2 * intermediate),
        (intermediate, hidden_size),
    ]
    buffer = torch.full((max(rows * columns for rows, columns in shapes),), 1e-2, dtype=dtype, device=device)
    into_heads, out_of_heads, into_mlp, out_of_mlp = (
        buffer[: rows * columns].view(columns, rows).t() for rows, columns in shapes
    )
    token_flops: int = 2 * sum(rows * columns for rows, columns in shapes)
    tokens = max(_FEWEST_TOKENS, min(_TOKENS[device.type], int(_FLOPS[device.type] / token_flops)))
    hidden_TD = torch.full((tokens, hidden_size), 1e-2, dtype=dtype, device=device)

    def layer() -> None:
        query_TD, key_TD, _ = (norm(hidden_TD) @ into_heads).split((queries, keys, keys), dim=1)
        rotate(key_TD)
        residual_TD = hidden_TD + rotate(query_TD) @ out_of_heads
        gate_TD, up_TD = (norm(residual_TD) @ into_mlp).chunk(2, dim=1)
        residual_TD + (silu(gate_TD) * up_TD) @ out_of_mlp

    return tokens * token_flops / _seconds(layer, device)


def _apply_norm(hidden_TD: torch.Tensor) -> torch.Tensor:
    """RMS norm as transformers' models compute it."""
    wide_TD = hidden_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + 1e-6)
    return hidden_TD.new_ones(hidden_TD.shape[1]) * wide_TD.to(hidden_TD.dtype)


def _apply_rotation(heads_TD: torch.Tensor) -> torch.Tensor:
    """An operation that takes as long as rotary positions."""
    first_TD, second_TD = heads_TD.chunk(2, dim=1)
    return heads_TD * 0.5 + torch.cat((-second_TD, first_TD), dim=1) * 0.5


def _identity(tensor_TD: torch.Tensor) -> torch.Tensor:
    return tensor_TD


def _attention_flops_per_second(sizes: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> float:
    shape = (1, sizes["num_heads"], _ATTENTION_TOKENS, sizes["head_dim"])
    query_BHSD = torch.full(shape, 1e-2, dtype=dtype, device=device)

    def attend() -> None:
        scaled_dot_product_attention(query_BHSD, query_BHSD, query_BHSD, is_causal=True)

    flops: int = 2 * sizes["num_heads"] * sizes["head_dim"] * _ATTENTION_TOKENS**2
    return flops / _seconds(attend, device)


def _read_bytes_per_second(device: torch.device) -> float:
    buffer = torch.ones(_READ_BYTES // 4, device=device)
    return _READ_BYTES / _seconds(buffer.sum, device)


def _disk_bytes_per_second(path: Path) -> float:
    """The rate of reading the beginning of a file after the system dropped it from its cache."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, _DISK_BYTES, os.POSIX_FADV_DONTNEED)
        start, num_read = time.perf_counter(), 0
        while num_read < _DISK_BYTES and (chunk := file.read(_DISK_CHUNK_BYTES)):
            num_read += len(chunk)
        return num_read / (time.perf_counter() - start)


def _operation_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """The time of a small module's call: Python, the operator's dispatch, and hardly any arithmetic."""
    module, small = torch.nn.SiLU(), torch.ones(8, dtype=dtype, device=device)

    def operate() -> None:
        for _ in range(_SMALL_OPERATIONS):
            module(small)

    return _seconds(operate, device) / _SMALL_OPERATIONS


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of a call over _SECONDS: other processes interrupt some calls."""
    work()
    _wait_for(device)
    began = time.perf_counter()
    durations: list[float] = []
    while not durations or time.perf_counter() - began < _SECONDS:
        start = time.perf_counter()
        work()
        _wait_for(device)
        durations.append(time.perf_counter() - start)
    return median(durations)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
