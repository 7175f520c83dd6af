"""Floating-point operations by arithmetic, held against PyTorch's count of a real forward pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mismatch_probe.compare.cost.architecture import (
    _MATRIX_NAMES,
    Architecture,
    UnknownArchitecture,
    architecture_of,
    read_architecture,
)
from tests.tiny_models import make_checkpoint

ROWS, LENGTH, VOCABULARY = 3, 20, 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def model_of(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **SHAPE, **(EXPERTS if kind in MIXTURES else {}))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if kind in MIXTURES:
        model.set_experts_implementation("eager")
    return model


def described(model: Any) -> Architecture:
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return architecture_of(model.config.to_dict(), shapes)


@pytest.mark.parametrize("kind", _MATRIX_NAMES)
def test_a_forward_pass_takes_what_pytorch_counts(kind: str) -> None:
    model = model_of(kind)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.ones((ROWS, LENGTH), dtype=torch.long), use_cache=False)
    architecture, tokens = described(model), ROWS * LENGTH
    attention = architecture.attention_flops(np.full(ROWS, float(LENGTH)), causal=False)
    assert architecture.matrix_flops(tokens, tokens) + attention == counted.get_total_flops()


def test_a_causal_kernel_takes_half_and_a_window_less() -> None:
    full = Architecture(64, 128, 4, 2, 16, 96, (None, None), 0, 0, 0, 0)
    windowed = Architecture(64, 128, 4, 2, 16, 96, (10, None), 0, 0, 0, 0)
    lengths = np.asarray([100.0])
    pairs = 4 * 4 * 16
    assert full.attention_flops(lengths, causal=True) == pairs * 2 * 100 * 100 / 2
    assert windowed.attention_flops(lengths, causal=True) == pairs * (10 * 100 - 10 * 10 / 2 + 100 * 100 / 2)
    assert full.kv_bytes(7, 2) == 7 * 2 * 2 * 2 * 16 * 2


def test_a_checkpoint_is_read_as_its_model_is(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3-moe")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert read_architecture(folder) == described(model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "mamba"}, "the arithmetic of mamba is not known here"),
        ({"model_type": None}, "the arithmetic of this architecture is not known here"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "wide"}, "does not say hidden_size"),
        ({"num_hidden_layers": None}, "does not say num_hidden_layers"),
        ({"text_config": {"hidden_size": 8}}, "more than read text"),
    ],
)
def test_what_is_not_known_has_no_estimate(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownArchitecture, match=why):
        architecture_of({**SHAPE, "model_type": "llama", **change}, {"model.layers.0.weight": (4, 4)})
