from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer, attention
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.attention import (
    EAGER_IN_BLOCKS,
    FUSED,
    AttentionChoice,
    choose_reference_attention,
    fused_sdpa,
    use_reference_kernels,
)
from tests.tiny_models import FAMILIES
from tests.training_path.flat import flat

Checkpoint = Callable[[str], Path]
PLAIN_SOFTMAX = [family for family in FAMILIES if family != "gemma2"]
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
}


def random_model(config: PreTrainedConfig, dtype: Dtype = Dtype.FP32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    use_reference_kernels(model)
    return model


def chosen(model: PreTrainedModel, dtype: Dtype = Dtype.FP32) -> AttentionChoice:
    choice = choose_reference_attention(model, Arithmetic(dtype, "cpu", None, is_reference=True))
    assert model.config._attn_implementation == (FUSED if choice.fused else EAGER_IN_BLOCKS)
    return choice


def gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP64])
@pytest.mark.parametrize("family", PLAIN_SOFTMAX)
def test_plain_softmax_attention_takes_a_fused_kernel_whose_error_is_rounding(family: str, dtype: Dtype) -> None:
    choice = chosen(random_model(FAMILIES[family](), dtype), dtype)
    assert choice.fused, choice.why
    assert 0 <= choice.fused_error < 32 * torch.finfo(torch_dtype(dtype)).eps


def test_gemma3_has_no_soft_cap_and_takes_a_fused_kernel_on_both_kinds_of_layers() -> None:
    config = Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=32, sliding_window_pattern=2)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert chosen(random_model(config)).fused


def test_a_soft_cap_keeps_the_eager_formula() -> None:
    choice = chosen(random_model(FAMILIES["gemma2"]()))
    assert not choice.fused
    assert "attn_logit_softcapping" in choice.why


def test_attention_sinks_keep_the_eager_formula() -> None:
    choice = chosen(random_model(gpt_oss()))
    assert not choice.fused
    assert "no SDPA attention" in choice.why


def test_a_soft_cap_that_the_config_does_not_tell_shows_in_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "sdpa_leaves_out", lambda config: None)
    assert_seen(chosen(random_model(FAMILIES["gemma2"]())))


def test_sinks_that_transformers_does_not_tell_show_in_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_sdpa", lambda config: True)
    assert_seen(chosen(random_model(gpt_oss())))


def test_a_kernel_that_is_off_by_a_thousandth_of_its_scale_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return fused_sdpa(*args, scaling=scaling * 1.001, **kwargs)

    monkeypatch.setattr(attention, "fused_sdpa", off)
    assert_seen(chosen(random_model(FAMILIES["llama"]())))


def test_without_a_fused_kernel_the_eager_formula_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FUSED_KERNELS", [attention.SDPBackend.CUDNN_ATTENTION])
    choice = chosen(random_model(FAMILIES["llama"]()))
    assert not choice.fused
    assert "no fused kernel" in choice.why


@pytest.mark.slow
@pytest.mark.parametrize("family", PLAIN_SOFTMAX)
def test_the_reference_scores_padded_and_long_rows_as_the_eager_formula_does(
    family: str, checkpoint: Checkpoint
) -> None:
    random = np.random.default_rng(0)
    batch = [TokenSequence(str(length), [1, 2], random.integers(0, 256, length).tolist()) for length in (200, 170, 3)]
    with Scorer.load(checkpoint(family), Dtype.FP32, TrainingPathSettings(), reference=True) as scorer:
        settings = scorer.effective_settings()
        fused = scorer.score_batch(batch)
        scorer._model.set_attn_implementation(EAGER_IN_BLOCKS)
        eager = scorer.score_batch(batch)
    assert settings["attention"] == FUSED
    assert settings["attention_choice"]["fused"]
    assert 0 < np.abs(flat(fused) - flat(eager)).max() < 5e-5


def test_pi_has_no_attention_chosen_for_it(checkpoint: Checkpoint) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.FP32, TrainingPathSettings()) as scorer:
        assert scorer.effective_settings()["attention_choice"] is None


def assert_seen(choice: AttentionChoice) -> None:
    assert not choice.fused
    assert "another formula" in choice.why
    assert choice.fused_error > 100 * choice.eager_error


@pytest.mark.parametrize("kernel", [EAGER_IN_BLOCKS, FUSED])
def test_patches_of_an_image_see_each_other(kernel: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SiglipVisionModel(SiglipVisionConfig(**shape, image_size=28, patch_size=14, initializer_range=0.2)).eval()
    pixels = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        own = model(pixel_values=pixels).last_hidden_state
        model.set_attn_implementation(kernel)
        assert torch.allclose(model(pixel_values=pixels).last_hidden_state, own, atol=1e-5)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = True
        assert not torch.allclose(model(pixel_values=pixels).last_hidden_state, own, atol=1e-2)
