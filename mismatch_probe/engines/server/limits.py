"""What cannot be asked of any server; known without asking one."""

from typing import Final

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

SMALLEST_TEMPERATURE: Final = 0.01
"""Servers raise a lower temperature to this, or take it for greedy."""


def check_limits(dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
    """
    Raises:
        UsageError: no server computes in this dtype, samples so, or has such log-probs.
    """
    if not dtype.is_computed_in:
        raise UsageError(f"no server runs in {dtype}; say in which dtype it runs: url=...,dtype=bf16")
    if sampling.temperature < SMALLEST_TEMPERATURE:
        raise UsageError(
            f"--temperature {sampling.temperature} cannot be used: a server would silently sample at another; give at "
            f"least {SMALLEST_TEMPERATURE}"
        )
    if engine.prefill and sampling.temperature != 1:
        raise UsageError(
            f"prefill=true cannot be used with --temperature {sampling.temperature}: a server's prompt log-probs carry "
            "no temperature; leave prefill out, or sample at temperature 1"
        )
