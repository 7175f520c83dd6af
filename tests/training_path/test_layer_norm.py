import copy

import pytest
import torch
from transformers import StableLmConfig, StableLmForCausalLM

from mismatch_probe.training_path.inside.fp32_parts import (
    RESIDUAL,
    let_layer_norms_widen,
    model_part_in_fp32,
    raise_to_fp32,
)

IDS = torch.arange(12)[None]


def tiny_model() -> StableLmForCausalLM:
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    return StableLmForCausalLM(StableLmConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **shape)).eval()


def test_a_layer_norm_computes_in_the_format_of_its_input_until_that_is_undone() -> None:
    norm = torch.nn.LayerNorm(8).half()
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e6
    undo = let_layer_norms_widen(norm)
    assert norm(hidden).dtype == torch.float32
    assert torch.equal(norm(hidden), torch.nn.LayerNorm(8)(hidden))
    assert norm(torch.ones(3, 8).half()).dtype == torch.float16
    for undone in undo:
        undone()
    with pytest.raises(RuntimeError):
        norm(hidden)


@torch.no_grad()
def test_the_residual_stream_of_a_model_with_layer_norms_can_be_raised() -> None:
    exact = tiny_model()
    low = copy.deepcopy(exact).bfloat16()
    plain = low(input_ids=IDS).logits
    with model_part_in_fp32(low, RESIDUAL):
        with_part = low(input_ids=IDS).logits
    assert not torch.equal(with_part, plain)
    assert torch.equal(low(input_ids=IDS).logits, plain)
    half = copy.deepcopy(exact).half()
    raise_to_fp32(half, exact, [], "model.layers.0")
    assert torch.allclose(half(input_ids=IDS).logits.float(), exact(input_ids=IDS).logits, atol=1e-2)
