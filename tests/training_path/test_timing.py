"""What a forward pass computes is PyTorch's count, for any architecture; the machine's rates are measured for real."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from mismatch_probe.training_path import timing
from mismatch_probe.training_path.timing import Uncountable, count, count_forward, measure
from tests.tiny_models import make_checkpoint

KINDS = [("engine", "bf16"), ("training", "fp16"), ("training", "fp32"), ("training", "fp64")]
PER_SECOND = (
    "matrix_flops_per_second",
    "attention_flops_per_second",
    "memory_bytes_per_second",
    "disk_bytes_per_second",
)
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 128, 2, 4, 2, 16, 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
PROJECTIONS = 2 * HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
PAIRS = LAYERS * 4 * HEADS * HEAD_DIM
HEAD = 2 * HIDDEN * VOCABULARY


def config_of(kind: str, **more: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**SHAPE, **more})
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3", "qwen3", "smollm3", "cohere"]
)
def test_a_gated_decoder_computes_what_its_closed_formula_says(kind: str) -> None:
    counted = count_forward(config_of(kind))
    assert counted["token_flops"] == LAYERS * (PROJECTIONS + 6 * HIDDEN * INTERMEDIATE)
    assert (counted["pair_flops"], counted["head_flops"]) == (PAIRS, HEAD)


@pytest.mark.parametrize(
    ("kind", "more", "window"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}, (16, 0.5)),
        ("gemma3_text", {"layer_types": ["sliding_attention", "sliding_attention"]}, (16, 1.0)),
        ("gemma3_text", {"layer_types": ["full_attention", "full_attention"]}, None),
        ("mistral", {}, (16, 1.0)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (16, 0.5)),
        ("qwen2", {"use_sliding_window": False}, None),
        ("llama", {}, None),
    ],
)
def test_the_window_and_the_share_of_layers_that_have_it_are_the_configs(
    kind: str, more: dict[str, Any], window: tuple[int, float] | None
) -> None:
    more = more if kind == "llama" else {"sliding_window": 16, **more}
    counted = count_forward(config_of(kind, **more))
    assert (counted.get("window"), counted.get("windowed_share")) == (window or (None, None))


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [8, 16])
def test_of_a_mixture_only_the_experts_that_a_token_is_routed_to_are_computed(num_experts: int) -> None:
    more = {
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    counted = count_forward(config_of("qwen3_moe", **{**EXPERTS, **more}))
    router, experts = 2 * HIDDEN * num_experts, 2 * 6 * HIDDEN * EXPERTS["moe_intermediate_size"]
    assert counted["token_flops"] == LAYERS * (PROJECTIONS + router + experts)
    assert counted["intermediate_size"] == 2 * EXPERTS["moe_intermediate_size"]
    stored = 3 * HIDDEN * EXPERTS["moe_intermediate_size"]
    assert counted["layer_parameters"] > num_experts * stored


@pytest.mark.slow
def test_an_architecture_without_gates_is_counted_too() -> None:
    counted = count_forward(
        AutoConfig.for_model(
            "gpt2", vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=256
        )
    )
    assert counted["token_flops"] == LAYERS * 2 * 12 * HIDDEN * HIDDEN
    assert (counted["hidden_size"], counted["intermediate_size"]) == (HIDDEN, 4 * HIDDEN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_a_model_that_makes_its_own_mask_is_counted_too(kind: str) -> None:
    """It takes no mask of four dimensions."""
    sizes = {"word_embed_proj_dim": HIDDEN, "ffn_dim": INTERMEDIATE} if kind == "opt" else {}
    counted = count_forward(config_of(kind, **sizes))
    width = INTERMEDIATE if kind == "opt" else 4 * HIDDEN
    assert counted["token_flops"] == LAYERS * 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * width)


@pytest.mark.slow
def test_linear_attention_computes_no_pairs_in_its_layers() -> None:
    hybrid = count_forward(config_of("qwen3_next", **EXPERTS, layer_types=["linear_attention", "full_attention"]))
    assert hybrid["pair_flops"] == pytest.approx(PAIRS / LAYERS, rel=0.1)


def test_parameters_are_those_of_the_largest_layer_and_of_what_no_layer_holds() -> None:
    counted = count_forward(config_of("llama", tie_word_embeddings=True))
    layer = PROJECTIONS // 2 + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
    outside = VOCABULARY * HIDDEN + HIDDEN
    assert (counted["layer_parameters"], counted["outside_parameters"]) == (layer, outside)
    assert counted["parameters"] == LAYERS * layer + outside


def test_what_cannot_be_counted_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = config_of("llama")
    quantised.quantization_config = {"bits": 4}
    with pytest.raises(Uncountable, match="quantised"):
        count_forward(quantised)
    with pytest.raises(Uncountable, match="does not say num_attention_heads"):
        count_forward(
            AutoConfig.for_model("mamba", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS)
        )

    def reads_a_weight(*arguments: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(timing, "_flops", reads_a_weight)
    with pytest.raises(Uncountable, match=r"forward pass of llama cannot be counted .*meta tensors"):
        count_forward(config_of("llama"))


@pytest.mark.slow
def test_every_format_has_its_rates(llama: Path) -> None:
    (sizes,) = count([str(llama)], trust_remote_code=False)["architectures"]
    measured = measure(sizes, KINDS, "cpu", str(llama))
    assert [(rate["process"], rate["dtype"]) for rate in measured["rates"]] == KINDS
    for rate in measured["rates"]:
        assert all(math.isfinite(rate[name]) and rate[name] > 1e5 for name in PER_SECOND), rate
        assert 0 < rate["operation_seconds"] < 1
    assert measured["device_memory_bytes"]["cpu"] > 2**28
    assert 0 < measured["free_memory_bytes"]["cpu"] <= measured["device_memory_bytes"]["cpu"]


@pytest.mark.slow
def test_every_checkpoint_is_counted_or_none(llama: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3-moe")
    folders = [str(llama), str(other)]
    answer = count(folders, trust_remote_code=False)
    assert (answer["unknown"], len(answer["architectures"])) == ("", 2)
    config = other / "config.json"
    values = json.loads(config.read_text())
    for change, why in (
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
        ({"model_type": "of-an-engine-alone"}, "cannot be used"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "asks for 1000000000 layers"),
    ):
        config.write_text(json.dumps({**values, **change}))
        answer = count(folders, trust_remote_code=False)
        assert why in answer["unknown"]
        assert answer["architectures"] == []
