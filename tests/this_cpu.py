"""What vLLM can do on the CPU at hand."""

import pytest
import torch

HAS_AVX512 = torch.cpu._is_avx512_supported()
HAS_AMX = torch.cpu._is_amx_tile_supported()
KEEPS_FP8 = HAS_AVX512 or HAS_AMX
needs_fp8_cache = pytest.mark.skipif(not KEEPS_FP8, reason="vLLM needs AVX-512 or AMX for an FP8 cache")
needs_fp8_weights = pytest.mark.skipif(not HAS_AMX, reason="vLLM needs AMX for weights that are stored in FP8 blocks")
