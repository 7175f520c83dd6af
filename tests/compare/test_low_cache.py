"""A KV cache in fewer bits than the arithmetic, on the real engine: refused where vLLM has none, named where it has."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_probe.engines.vllm.arguments import require_cpu_cache
from mismatch_probe.errors import ExitCode, UsageError
from tests.command_line import FEW, probe
from tests.compare.test_compare import summary_of

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
SMALL = ("--prompts", "sums:easy", "--num-prompts", "8", "--samples-per-prompt", "2", "--max-new-tokens", "32")
needs_wide_vectors = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported(),
    reason="vLLM keeps an FP8 cache with AVX-512 or AMX only",
)


@pytest.mark.parametrize(
    ("dtype_asked_for", "head_size", "has_wide_vectors", "words"),
    [
        ("nvfp4", 64, True, r"cannot be used on a CPU: .* or give one of fp8, fp8_e4m3, fp8_e5m2$"),
        ("fp8", 64, False, "needs AVX-512 or AMX for it; leave the flag out"),
        ("fp8", 80, True, "heads have 80 dimensions, and vLLM needs a multiple of 32"),
    ],
)
def test_a_cache_that_vllm_cannot_keep_here_is_refused(
    dtype_asked_for: str, head_size: int, has_wide_vectors: bool, words: str
) -> None:
    with pytest.raises(UsageError, match=rf"^--vllm\.kv_cache_dtype {dtype_asked_for} .*{words}"):
        require_cpu_cache(dtype_asked_for, FP8, head_size=head_size, has_wide_vectors=has_wide_vectors)


def test_a_cache_that_vllm_has_is_not_refused() -> None:
    require_cpu_cache("fp8", FP8, head_size=64, has_wide_vectors=True)
    require_cpu_cache("fp8", FP8, head_size=None, has_wide_vectors=True)


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_cache_of_a_gpu_is_refused_on_a_cpu_before_anything_is_sampled(
    dtype: str, dry_run: bool, llama: Path, tmp_path: Path
) -> None:
    out = ("--dry-run",) if dry_run else ("--out", tmp_path / "run")
    words = ("--model", llama, *SMALL, "--dtype", dtype, "--vllm.kv_cache_dtype", "nvfp4")
    answer = probe("compare", *words, *out, code=ExitCode.USAGE)
    assert "--vllm.kv_cache_dtype nvfp4 cannot be used on a CPU" in answer.stderr
    assert not list(tmp_path.glob("run/rollouts.parquet"))


@pytest.mark.slow
@needs_wide_vectors
def test_a_cache_in_fp8_is_named_in_fp32_and_in_sixteen_bits(llama: Path, tmp_path: Path) -> None:
    """`test_closer_measurements_end_to_end` has the same with an ordinary cache."""
    dtypes = ("--dtype", "bf16", "--dtype", "fp16", "--dtype", "fp32")
    cache = ("--vllm.kv_cache_dtype", "fp8")
    probe("compare", "--model", llama, *SMALL, *dtypes, *cache, "--config", FEW, "--out", tmp_path / "run")
    pairs: dict[str, Any] = {pair["train_dtype"]: pair["verdict"] for pair in summary_of(tmp_path / "run")["pairs"]}
    assert {verdict["code"] for verdict in pairs.values()} == {"one_sided_dtype"}
    assert "keeps keys and values in fp8" in pairs["fp32"]["sentence"]
    assert "--vllm.kv_cache_dtype auto" in pairs["fp32"]["advice"][0]
