"""The tables of the sizing report: what was measured here, and predictions for machines that nobody has run this on."""

from collections.abc import Sequence
from math import ceil, exp, log
from statistics import mean
from typing import Any, Final

from pydantic import BaseModel

from benchmarks.sizing.models import CHECKED, LARGE, large_architecture
from benchmarks.sizing.prediction import REFERENCE, Prediction, Task, predict
from mismatch_probe.compare.cost.roofline import Architecture, Calibration, ProcessName, Rates
from mismatch_probe.dtypes import Dtype

_GIB: Final = 2**30
_GPU_BYTES: Final = 80 * 10**9
_HOST_BYTES: Final = 1024 * _GIB
_PRICE: Final = 2.5
_HOST_PRICE: Final = 4.0
_TASK: Final = Task(prompts=64, prompt_tokens=512, response_tokens=4096, batch_tokens=16384)
_READY_SECONDS: Final = 20.0
_MOST_GPUS: Final = 1024
_ENGINE_SHARE: Final = 0.9


class Measurement(BaseModel):
    """One size and way: measured, and predicted by the cost model alone."""

    size: str
    way: str
    parameters: int
    seconds: float
    predicted_seconds: float
    peak_bytes: int
    predicted_bytes: int


def _gpu() -> Calibration:
    """An H100 of 80 GB as assumed: of its data sheet, 40 % of BF16's products and 60 % of FP32's outside of TF32."""
    both: tuple[ProcessName, ...] = ("engine", "training")
    flops = {Dtype.BF16: 0.4 * 989e12, Dtype.FP32: 0.6 * 67e12}
    rates = [
        Rates(
            process=process, dtype=dtype, device="cuda:0", matrix_flops_per_second=speed,
            attention_flops_per_second=speed / 2, memory_bytes_per_second=0.7 * 3.35e12, operation_seconds=5e-6,
            disk_bytes_per_second=2e9,
        )
        for process in both for dtype, speed in flops.items()
    ]  # fmt: skip
    free = {"cuda:0": _GPU_BYTES, "cpu": _HOST_BYTES}
    return Calibration(rates=rates, device_memory_bytes=dict(free), free_memory_bytes=dict(free))


def _host() -> Calibration:
    """64 cores of a server as assumed: 2 TFLOP/s in FP32."""
    rate = Rates(
        process="training", dtype=Dtype.FP32, device="cpu", matrix_flops_per_second=2e12,
        attention_flops_per_second=5e11, memory_bytes_per_second=2e11, operation_seconds=3e-6,
        disk_bytes_per_second=2e9,
    )  # fmt: skip
    return Calibration(rates=[rate], device_memory_bytes={"cpu": _HOST_BYTES}, free_memory_bytes={"cpu": _HOST_BYTES})


def _passes(task: Task) -> int:
    return ceil(task.prompts * (task.prompt_tokens + task.response_tokens) / task.batch_tokens)


def worst_of_checked(measured: Sequence[Measurement]) -> float:
    """The factor by which the extrapolated time or memory of the last size is off, at most."""
    factors = [
        max(extrapolated / actual, actual / extrapolated)
        for each in measured
        if each.size in CHECKED
        for extrapolated, actual in (
            (_extrapolated(measured, each, "seconds"), each.seconds),
            (_extrapolated(measured, each, "bytes"), each.peak_bytes),
        )
    ]
    return max(factors)


def _extrapolated(measured: Sequence[Measurement], checked: Measurement, what: str) -> float:
    """The prediction of a size, times what the smaller sizes took of theirs (geometric mean)."""
    names = {"seconds": ("seconds", "predicted_seconds"), "bytes": ("peak_bytes", "predicted_bytes")}
    actual, predicted = names[what]
    smaller = [each for each in measured if each.way == checked.way and each.size not in CHECKED]
    factor = exp(mean(log(getattr(each, actual) / getattr(each, predicted)) for each in smaller))
    return float(getattr(checked, predicted) * factor)


def page(measured: Sequence[Measurement], task: Task) -> str:
    return "\n".join(
        [
            "# Sizing: measured here, predicted for large checkpoints",
            "",
            "Made by `python -m benchmarks.sizing FOLDER` and then `--publish`. Which command is behind a line is in",
            "`docs/large-checkpoints.md`.",
            "",
            "## Measured on two x86 cores that others used as well",
            "",
            f"The FP32 reference of Llamas of 8 layers, stored in BF16, over {task.prompts} sequences of "
            f"{task.prompt_tokens + task.response_tokens} tokens.",
            "Memory is what the process holds of its own above the libraries. Predicted is what the cost model of",
            "`--dry-run` says, from rates measured a moment before; of memory it is an upper estimate.",
            "",
            *_measured_table(measured),
            "",
            "The last size is extrapolated: what the cost model says of it, times what the smaller sizes took of",
            "theirs. Its time was used for nothing else. Its memory was: see below.",
            "",
            *_checked_table(measured),
            "",
            "Of memory the cost model's own figure, in the first table, is the better one: at small sizes most of it",
            "is the estimate of a pass, which is too high, and taking that off the last size makes it too low. What is",
            "read of a layer in its stored dtype was added to the cost model after the last size had been seen, at",
            "0.98 without; the predictions of memory above were computed again with it: no check of that term.",
            "That a reference which is loaded whole reads its checkpoint once was added later too, and is not in its",
            "predicted times above.",
            "",
            "## Predicted: no GPU was measured",
            "",
            f"A comparison of {_TASK.prompts} prompts of {_TASK.prompt_tokens} tokens with one response of "
            f"{_TASK.response_tokens:,} tokens each.",
            f"Assumed: GPUs of 80 GB with {0.4 * 989:.0f} TFLOP/s in BF16 and {0.6 * 67:.0f} in FP32 (40 % and 60 % of "
            "an H100's data sheet, without TF32),",
            "a host of 64 cores with 2 TFLOP/s in FP32 and 1 TiB, a disk of 2 GB/s,",
            f"{_PRICE:.2f} USD an hour for a GPU and {_HOST_PRICE:.2f} for the host.",
            f"Over ranks (FSDP2) each computes passes of its own, of {_TASK.batch_tokens:,} tokens, of which there are "
            f"{_passes(_TASK)}: more ranks",
            "are no faster. Times are from a process that has imported everything until its last batch, with the",
            "checkpoint read from disk once (layer by layer four times). What ranks send each other is not in",
            "them, nor what vLLM takes to compile. Its steps are an eager engine's, without CUDA graphs.",
            "Cost is GPUs x hours x price. How far off these times are is not known.",
            "",
            *_large_table(),
            "",
        ]
    )


def _measured_table(measured: Sequence[Measurement]) -> list[str]:
    rows = [
        f"| {each.size} | {each.way} | {each.seconds:.1f} | {each.predicted_seconds / each.seconds:.2f} | "
        f"{each.peak_bytes / _GIB:.3f} | {each.predicted_bytes / each.peak_bytes:.2f} |"
        for each in measured
    ]
    head = "| size | way | time, s | predicted over measured | memory, GiB | predicted over measured |"
    return [head, "|---|---|---|---|---|---|", *rows]


def _checked_table(measured: Sequence[Measurement]) -> list[str]:
    rows = [
        f"| {each.size} | {each.way} | {_extrapolated(measured, each, 'seconds'):.1f} | {each.seconds:.1f} | "
        f"{_extrapolated(measured, each, 'bytes') / _GIB:.3f} | {each.peak_bytes / _GIB:.3f} |"
        for each in measured
        if each.size in CHECKED
    ]
    head = "| size | way | time extrapolated, s | measured | memory extrapolated, GiB | measured |"
    return [head, "|---|---|---|---|---|---|", *rows]


def _large_table() -> list[str]:
    head = "| model | what | GPUs of 80 GB | memory of each, GiB | time | cost, USD |"
    rows = [row for name in LARGE for row in _rows(name, large_architecture(name))]
    return [head, "|---|---|---|---|---|---|", *rows]


def _rows(name: str, sizes: Architecture) -> list[str]:
    gpu, host = _gpu(), _host()
    rows = [_engine_row(name, sizes, gpu)]
    rows += _over_ranks(name, "pi in BF16", sizes, gpu, "score-train-bf16")
    rows += _over_ranks(name, "reference in FP32", sizes, gpu, REFERENCE)
    layered = predict(sizes, gpu, _TASK, _READY_SECONDS, reference={"by_layer": True})
    rows.append(_fitting_row(name, "reference layer by layer on one GPU", layered, 1, _GPU_BYTES, _PRICE))
    on_host = predict(sizes, host, _TASK, _READY_SECONDS, reference={"by_layer": True}, training=_on_host())
    rows.append(_fitting_row(name, "reference layer by layer on the host", on_host, 0, _HOST_BYTES, _HOST_PRICE))
    return rows


def _over_ranks(name: str, what: str, sizes: Architecture, gpu: Calibration, stage: str) -> list[str]:
    """Whole on one GPU, and over as many ranks, a power of two, as it takes. Ranks deal out the passes."""
    rows, ranks = [], 1
    while True:
        training = {"batch_tokens": _TASK.batch_tokens, "ranks": ranks if ranks > 1 else None}
        taken = predict(sizes, gpu, _TASK, _READY_SECONDS, stage, training=training, reference={"by_layer": False})
        fits = taken.peak_bytes <= _GPU_BYTES
        sent = f"each sent {taken.received_bytes / _GIB:,.0f} GiB"
        how = "whole on one GPU" if ranks == 1 else f"over {ranks} ranks, {sent}"
        if ranks == 1 or fits or ranks == _MOST_GPUS:
            rows.append(_fitting_row(name, f"{what}, {how}", taken, ranks, _GPU_BYTES, _PRICE))
        if fits or ranks == _MOST_GPUS:
            return rows
        ranks *= 2


def _on_host() -> dict[str, Any]:
    return {"batch_tokens": _TASK.batch_tokens, "device": "cpu"}


def _engine_row(name: str, sizes: Architecture, gpu: Calibration) -> str:
    """On as many GPUs, a power of two, as hold the weights and the longest sequence's keys and values."""
    ranks = 1
    while True:
        engine = {"args": {"tensor_parallel_size": ranks}}
        sampled = predict(sizes, gpu, _TASK, _READY_SECONDS, "sample-bf16", engine=engine)
        if sampled.peak_bytes <= _ENGINE_SHARE * _GPU_BYTES or ranks == _MOST_GPUS:
            break
        ranks *= 2
    replayed = predict(sizes, gpu, _TASK, _READY_SECONDS, "replay-bf16", engine=engine)
    both = Prediction(sampled.load_seconds, sampled.score_seconds + replayed.score_seconds, sampled.peak_bytes)
    return _fitting_row(name, "mu in BF16, sampled and replayed (vLLM)", both, ranks, _GPU_BYTES, _PRICE)


def _fitting_row(name: str, what: str, taken: Prediction, gpus: int, memory: int, price: float) -> str:
    fits = taken.peak_bytes <= memory
    hours = taken.seconds / 3600
    time = _written(taken.seconds) if fits else "does not fit"
    cost = f"{max(gpus, 1) * hours * price:.2f}" if fits else ""
    return f"| {name} | {what} | {gpus or 'none'} | {taken.peak_bytes / _GIB:,.0f} | {time} | {cost} |"


def _written(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
