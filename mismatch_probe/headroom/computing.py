# mypy: allow-untyped-calls
"""The arithmetic that training has."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from mismatch_probe.training_path.arithmetic import true_fp32
from mismatch_probe.training_path.products import CpuProducts


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """FP32 in IEEE FP32, and on a CPU FP16 products added up in FP32 as tensor cores do."""
    with ExitStack() as stack:
        stack.enter_context(true_fp32())
        if device.type == "cpu":
            stack.enter_context(CpuProducts())
        yield
