"""The machine's rates are measured: real arithmetic, of every format, in moderate memory."""

import math

from mismatch_probe.training_path.timing import measure

SMALL = {"hidden": 64, "queries": 64, "keys": 32, "intermediate": 128, "heads": 2, "head_dim": 32}
ASKED = [("engine", "bf16"), ("training", "fp16"), ("training", "fp32"), ("training", "fp64")]
PER_SECOND = ("matrix_flops_per_second", "attention_flops_per_second", "memory_bytes_per_second")


def test_every_format_has_its_rates() -> None:
    found = measure(lambda message: None, SMALL, ASKED, "cpu")  # type: ignore[arg-type]
    assert [(one["process"], one["dtype"]) for one in found["rates"]] == ASKED
    for one in found["rates"]:
        assert all(math.isfinite(one[name]) and one[name] > 1e5 for name in PER_SECOND), one
        assert 0 < one["operation_seconds"] < 1
    assert found["device_memory_bytes"]["cpu"] > 2**28
