"""What vLLM can do on the CPU at hand."""

import pytest
import torch

HAS_AVX512 = torch.cpu._is_avx512_supported()
KEEPS_FP8 = HAS_AVX512 or torch.cpu._is_amx_tile_supported()
needs_fp8_cache = pytest.mark.skipif(not KEEPS_FP8, reason="vLLM needs AVX-512 or AMX for an FP8 cache")


def fails_without_avx512(what: str) -> pytest.MarkDecorator:
    """A known fault: what vLLM's kernels for a CPU without AVX-512 do otherwise."""
    return pytest.mark.xfail(not HAS_AVX512, reason=f"without AVX-512 {what}", strict=False)
