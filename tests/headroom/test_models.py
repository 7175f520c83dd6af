from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path.inside import fp32_parts
from tests.tiny_models import make_checkpoint

IDS = torch.arange(24).reshape(2, 12)
SETTINGS = HeadroomSettings(model=ModelSettings(path="tiny"))


def kept_in_fp32(folder: Path, modules: list[str], residual_from: str | None = None) -> PreTrainedModel:
    model = fp32_parts.load_in_format(folder, Dtype.FP16, SETTINGS)
    fp32_parts.raise_to_fp32(model, fp32_parts.load_in_format(folder, Dtype.FP32, SETTINGS), modules, residual_from)
    return model


def result_formats(model: PreTrainedModel) -> dict[str, torch.dtype]:
    formats: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: (
                formats.update({name: (output[0] if isinstance(output, tuple) else output).dtype})
                if not hasattr(output, "keys")
                else None
            )
        )
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return formats


def test_a_raised_module_answers_in_fp32_and_the_others_do_not(tmp_path: Path) -> None:
    formats = result_formats(kept_in_fp32(make_checkpoint(tmp_path / "m"), ["model.layers.0.mlp"]))
    assert formats["model.layers.0.mlp.down_proj"] == torch.float32
    assert formats["model.layers.0.self_attn.q_proj"] == torch.float16
    assert formats["model.layers.1.mlp.down_proj"] == torch.float16
    assert formats["model.layers.1"] == torch.float32, "what was added in FP32 stays in FP32"


def test_a_residual_stream_in_fp32_leaves_the_products_in_fp16(tmp_path: Path) -> None:
    formats = result_formats(kept_in_fp32(make_checkpoint(tmp_path / "m"), [], "model.layers.1"))
    assert formats["model.layers.0"] == torch.float16
    assert formats["model.layers.1"] == torch.float32
    assert formats["model.layers.1.mlp.down_proj"] == torch.float16
    assert formats["lm_head"] == torch.float16


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "gemma2"])
def test_everything_in_fp32_is_the_fp32_model(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    complete_model = fp32_parts.load_in_format(folder, Dtype.FP32, SETTINGS)
    model = kept_in_fp32(folder, ["model", "lm_head"])
    with torch.no_grad():
        difference = (
            model(input_ids=IDS, use_cache=False).logits - complete_model(input_ids=IDS, use_cache=False).logits
        )
    assert float(difference.abs().max()) < 1e-5


def test_a_raised_head_does_not_raise_the_embeddings_it_was_tied_to(tmp_path: Path) -> None:
    model = kept_in_fp32(make_checkpoint(tmp_path / "m", "qwen3"), ["lm_head"])
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert model.get_input_embeddings().weight.dtype == torch.float16


@pytest.mark.parametrize(
    ("module", "raised"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn"),
        ("model.layers.0.self_attn", "model.layers.0.self_attn"),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        ("model.layers.0", "model.layers.0"),
        ("model", "model.embed_tokens"),
    ],
)
def test_what_must_be_in_fp32_for_a_module_to_be(tmp_path: Path, module: str, raised: str) -> None:
    assert (
        fp32_parts.fp32_module(fp32_parts.load_in_format(make_checkpoint(tmp_path / "m"), Dtype.FP32, SETTINGS), module)
        == raised
    )


def test_a_module_stands_for_what_lies_inside_it() -> None:
    assert fp32_parts.outermost(["a.b", "a.b.c", "a.bc", "d"]) == ["a.b", "a.bc", "d"]


@pytest.mark.parametrize(("family", "attention"), [("gemma2", "eager"), ("llama", "sdpa")])
def test_a_soft_cap_of_attention_scores_is_kept_in_the_fp16_run(tmp_path: Path, family: str, attention: str) -> None:
    model = fp32_parts.load_in_format(make_checkpoint(tmp_path / "m", family), Dtype.FP16, SETTINGS)
    assert model.config._attn_implementation == attention
