"""The sizes: four that are measured here, and configs of 7, 70 and 600 billion parameters, of which only the shapes."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from mismatch_probe.compare.cost.roofline import Architecture
from mismatch_probe.training_path.timing import count_forward

MEASURED: Final = {"26M": 512, "60M": 768, "107M": 1024}
CHECKED: Final = {"420M": 2048}
"""Hidden sizes of Llamas of 8 layers; the prediction from the first three is held against the last."""

LARGE: Final[dict[str, PreTrainedConfig]] = {
    "7B (Qwen2.5-7B)": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "70B (Llama-3.1-70B)": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "600B (Qwen3-Coder-480B with 200 experts)": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=6144, intermediate_size=8192, moe_intermediate_size=2560, num_hidden_layers=62,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, num_experts=200, num_experts_per_tok=8,
    ),
}  # fmt: skip


def make(folder: Path, hidden_size: int) -> Path:
    """A random checkpoint of one of the measured sizes, in BF16 and in shards; it stays for another time."""
    if (folder / "config.json").exists():
        return folder
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=8,
        num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 256, initializer_range=0.05,
        tie_word_embeddings=True, torch_dtype="bfloat16",
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    return folder


def architecture(config: PreTrainedConfig) -> Architecture:
    """Of a model that has no weights."""
    return Architecture(**count_forward(config))


@cache
def large_architecture(name: str) -> Architecture:
    """Of one of `LARGE`, whose many modules take seconds to make."""
    return architecture(LARGE[name])
