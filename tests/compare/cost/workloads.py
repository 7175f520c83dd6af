"""Workloads of small numbers, and rates of round ones."""

from typing import Any

from mismatch_probe.compare.cost.roofline import Architecture, Calibration, ProcessName, Rates
from mismatch_probe.compare.cost.stage_work import ResponseLengths, Workload
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.stages import Stage
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.dtypes import Dtype

ARCHITECTURE = Architecture(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=96,
    parameters=100_000,
    layer_parameters=45_000,
    outside_parameters=10_000,
    token_flops=180_000,
    pair_flops=512,
    head_flops=12_288,
)


def settings(**changes: Any) -> CompareSettings:
    values = {
        "model": {"path": "none"},
        "engine": {"batch_sequences": 256},
        "training": {"batch_tokens": 2048},
        "experts": {"num_sequences": 16},
    }
    return parse_settings(CompareSettings, {**values, **changes})


def workload(
    *,
    prompts: int = 8,
    prompt_tokens: int = 20,
    response_tokens: float = 50,
    architecture: Architecture = ARCHITECTURE,
    checkpoint_dtype: Dtype | None = None,
    **changes: Any,
) -> Workload:
    responses = ResponseLengths(response_tokens, round(response_tokens), "the test")
    given = settings(**changes)
    return Workload({given.model.path: architecture}, given, [prompt_tokens] * prompts, responses, checkpoint_dtype)


def stage(name: str, **changes: Any) -> Stage:
    """The stage of that name in the plan of `settings`."""
    return next(planned for planned in make_plan(settings(**changes)).stages if planned.name == name)


def rates(process: ProcessName, dtype: Dtype, speed: float = 1.0) -> Rates:
    return Rates(
        process=process,
        dtype=dtype,
        device="cpu",
        matrix_flops_per_second=1e9 * speed,
        attention_flops_per_second=1e9 * speed,
        memory_bytes_per_second=1e9 * speed,
        operation_seconds=1e-6 / speed,
        disk_bytes_per_second=1e9 * speed,
    )


def calibration(speed: float = 1.0, memory_bytes: int = 2**34) -> Calibration:
    both: tuple[ProcessName, ...] = ("engine", "training")
    return Calibration(
        rates=[rates(process, dtype, speed) for process in both for dtype in Dtype],
        device_memory_bytes={"cpu": memory_bytes},
        free_memory_bytes={"cpu": memory_bytes},
    )
