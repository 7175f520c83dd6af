"""How fast this machine is: a layer of a checkpoint's widths, attention, a read of memory and small operations, timed.

It takes a second or two, in a job of its own. The made-up weights of the layer share one small buffer, so a large
checkpoint takes no more memory than a small one.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from mismatch_probe.children.messages import Send
from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import free_memory, memory_errors_named

_SECONDS: Final = 0.06
"""For each number, after a run that warms it up."""
_TOKENS: Final = {"cpu": 512, "cuda": 4096}
_FEWEST_TOKENS: Final = 64
_FLOPS: Final = {"cpu": 1e10, "cuda": 1e13}
"""At most, of one call: fewer tokens of a wide model tell as much."""
_ATTENTION_TOKENS: Final = 512
_MOST_WEIGHTS: Final = 2**25
"""Elements of a made-up weight; wider matrices are no faster."""
_READ_BYTES: Final = 2**27
_DISK_BYTES: Final = 2**26
_DISK_CHUNK_BYTES: Final = 2**22
_SMALL_OPERATIONS: Final = 200


def measure(
    send: Send, widths: Mapping[str, int], kinds: Sequence[tuple[str, str]], training_device: str, weight_file: str
) -> dict[str, Any]:
    """The values of a `compare.cost.rates.Calibration` for each process (`engine`, `training`) and dtype asked for.

    weight_file: of the checkpoint, which is read where it lies.

    Raises:
        UsageError: there is no such device.
        OutOfMemory: a device is full.
    """
    with memory_errors_named("measuring how fast this machine is", "free some and try again"):
        return _measure_kinds(widths, kinds, training_device, Path(weight_file))


def _measure_kinds(
    widths: Mapping[str, int], kinds: Sequence[tuple[str, str]], training_device: str, weight_file: Path
) -> dict[str, Any]:
    devices = {
        "training": choose_device(training_device),
        "engine": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    }
    reads = {device: _read_bytes_per_second(device) for device in dict.fromkeys(devices.values())}
    from_disk = _disk_bytes_per_second(weight_file)
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
                **_rates(process, dtype, device, widths),
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


def _rates(process: str, dtype: Dtype, device: torch.device, widths: Mapping[str, int]) -> dict[str, float]:
    with _arithmetic(process, dtype, device):
        return {
            "matrix_flops_per_second": _layer_flops_per_second(process, widths, torch_dtype(dtype), device),
            "attention_flops_per_second": _attention_flops_per_second(widths, torch_dtype(dtype), device),
            "operation_seconds": _operation_seconds(torch_dtype(dtype), device),
        }


@contextmanager
def _arithmetic(process: str, dtype: Dtype, device: torch.device) -> Iterator[None]:
    """The training path's own; an engine has its own kernels, and its FP32 is true FP32 as well."""
    arithmetic = Arithmetic(dtype, device.type, None, is_reference=dtype.can_be_reference)
    if process == "training":
        with arithmetic.active():
            yield
    else:
        with arithmetic.flags_set(), torch.no_grad():
            yield


def _layer_flops_per_second(process: str, widths: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> float:
    """Of a layer without its attention, element-wise operations included in the time and not in the count.

    An engine fuses norms and rotary positions with what is around them: there they are left out.
    """
    normed, rotated = (_normed, _rotated) if process == "training" else (_as_it_is, _as_it_is)
    hidden_size, queries, keys = widths["hidden"], widths["queries"], widths["keys"]
    intermediate = min(widths["intermediate"], max(hidden_size, _MOST_WEIGHTS // hidden_size))
    sizes = [
        (hidden_size, queries + 2 * keys),
        (queries, hidden_size),
        (hidden_size, 2 * intermediate),
        (intermediate, hidden_size),
    ]
    buffer = torch.full((max(rows * columns for rows, columns in sizes),), 1e-2, dtype=dtype, device=device)
    into_heads, out_of_heads, up, down_weight = (
        buffer[: rows * columns].view(columns, rows).t() for rows, columns in sizes
    )
    token_flops = 2 * sum(rows * columns for rows, columns in sizes)
    tokens = max(_FEWEST_TOKENS, min(_TOKENS[device.type], int(_FLOPS[device.type] / token_flops)))
    hidden_TD = torch.full((tokens, hidden_size), 1e-2, dtype=dtype, device=device)

    def layer() -> None:
        query_TD, key_TD, _ = (normed(hidden_TD) @ into_heads).split((queries, keys, keys), dim=1)
        rotated(key_TD)
        residual_TD = hidden_TD + rotated(query_TD) @ out_of_heads
        gate_TD, up_TD = (normed(residual_TD) @ up).chunk(2, dim=1)
        residual_TD + (silu(gate_TD) * up_TD) @ down_weight

    return tokens * token_flops / _seconds(layer, device)


def _normed(hidden_TD: torch.Tensor) -> torch.Tensor:
    """RMS norm as transformers' models write it out."""
    wide_TD = hidden_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + 1e-6)
    return hidden_TD.new_ones(hidden_TD.shape[1]) * wide_TD.to(hidden_TD.dtype)


def _rotated(heads_TD: torch.Tensor) -> torch.Tensor:
    """As much as rotary positions take."""
    first_TD, second_TD = heads_TD.chunk(2, dim=1)
    return heads_TD * 0.5 + torch.cat((-second_TD, first_TD), dim=1) * 0.5


def _as_it_is(tensor_TD: torch.Tensor) -> torch.Tensor:
    return tensor_TD


def _attention_flops_per_second(widths: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> float:
    shape = (1, widths["heads"], _ATTENTION_TOKENS, widths["head_dim"])
    query_BHSD = torch.full(shape, 1e-2, dtype=dtype, device=device)

    def attend() -> None:
        scaled_dot_product_attention(query_BHSD, query_BHSD, query_BHSD, is_causal=True)

    flops = 2 * widths["heads"] * widths["head_dim"] * _ATTENTION_TOKENS**2
    return flops / _seconds(attend, device)


def _read_bytes_per_second(device: torch.device) -> float:
    buffer = torch.ones(_READ_BYTES // 4, device=device)
    return _READ_BYTES / _seconds(buffer.sum, device)


def _disk_bytes_per_second(path: Path) -> float:
    """Of the beginning of a file, which the system is asked to forget before."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, _DISK_BYTES, os.POSIX_FADV_DONTNEED)
        before, read = time.perf_counter(), 0
        while read < _DISK_BYTES and (chunk := file.read(_DISK_CHUNK_BYTES)):
            read += len(chunk)
        return read / (time.perf_counter() - before)


def _operation_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Of a small module's call: Python, the operator's dispatch, and hardly any arithmetic."""
    module, small = torch.nn.SiLU(), torch.ones(8, dtype=dtype, device=device)

    def operate() -> None:
        for _ in range(_SMALL_OPERATIONS):
            module(small)

    return _seconds(operate, device) / _SMALL_OPERATIONS


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the median of calls that fill _SECONDS: others on the machine interrupt some of them."""
    work()
    _wait_for(device)
    began = time.perf_counter()
    durations: list[float] = []
    while not durations or time.perf_counter() - began < _SECONDS:
        before = time.perf_counter()
        work()
        _wait_for(device)
        durations.append(time.perf_counter() - before)
    return median(durations)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
