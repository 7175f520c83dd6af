"""A checkpoint larger than a limit of memory: by layers it is scored under it, whole it fails and says how to go on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.warm_python import warm_python

LIMIT_MIB = 140
LAYERS = 24
TOO_LARGE = "its weights in fp32 take 288 MiB"
"""What is free differs by the page."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """288 MiB in FP32, stored in BF16 in shards of 20 MB."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=3840, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 > 2 * LIMIT_MIB * 2**20
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20MB")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="what a process has taken is read from Linux's /proc"
)
def test_a_checkpoint_larger_than_the_limit_is_scored_by_layers_with_the_same_bits(large: Path, tmp_path: Path) -> None:
    def message_of(way: str, limit_mib: int) -> str:
        return warm_python("tests.training_path.limited_memory", large, way, limit_mib, tmp_path / way).stdout

    assert message_of("whole", 0).strip() == "None"
    choice, failure = message_of("whole", LIMIT_MIB).splitlines()
    assert choice.startswith(TOO_LARGE)
    assert failure.startswith(f"out of memory while loading {large}; hold one layer of the reference at a time")
    assert "--reference-by-layer" in failure
    [choice] = message_of("by-layer", LIMIT_MIB).splitlines()
    assert choice.startswith(TOO_LARGE)
    np.testing.assert_array_equal(np.load(tmp_path / "by-layer.npy"), np.load(tmp_path / "whole.npy"))
