"""The machine's rates are measured: real arithmetic, of every format, in moderate memory."""

import math
from pathlib import Path

import pytest

from mismatch_probe.training_path.timing import measure

SMALL = {"hidden": 64, "queries": 64, "keys": 32, "intermediate": 128, "heads": 2, "head_dim": 32}
ASKED = [("engine", "bf16"), ("training", "fp16"), ("training", "fp32"), ("training", "fp64")]
PER_SECOND = (
    "matrix_flops_per_second",
    "attention_flops_per_second",
    "memory_bytes_per_second",
    "disk_bytes_per_second",
)


@pytest.mark.slow
def test_every_format_has_its_rates(llama: Path) -> None:
    file = str(llama / "model.safetensors")
    measured = measure(lambda message: None, SMALL, ASKED, "cpu", file)  # type: ignore[arg-type]
    assert [(rate["process"], rate["dtype"]) for rate in measured["rates"]] == ASKED
    for rate in measured["rates"]:
        assert all(math.isfinite(rate[name]) and rate[name] > 1e5 for name in PER_SECOND), rate
        assert 0 < rate["operation_seconds"] < 1
    assert measured["device_memory_bytes"]["cpu"] > 2**28
    assert 0 < measured["free_memory_bytes"]["cpu"] <= measured["device_memory_bytes"]["cpu"]
