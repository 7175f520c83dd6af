"""What vLLM cannot do whatever the checkpoint; known without loading it."""

from typing import Final

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

_DTYPES: Final = [dtype for dtype in Dtype if dtype != Dtype.FP64]

SMALLEST_TEMPERATURE: Final = 0.01
"""vLLM raises a lower temperature to this, with nothing but a warning."""


def check_limits(dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
    """
    Raises:
        UsageError: vLLM has no such dtype, or would sample from another distribution than the one asked for.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"vLLM cannot run in {dtype}; give --infer-dtype one of {', '.join(_DTYPES)}")
    if sampling.temperature < SMALLEST_TEMPERATURE:
        raise UsageError(
            f"--temperature {sampling.temperature} cannot be used: vLLM would silently sample at "
            f"{SMALLEST_TEMPERATURE}; give at least that"
        )
