"""Weights that do not fit their config are told before anything runs, and those that do are let through."""

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.errors import UsageError
from mismatch_probe.training_path.fit import require_fit
from mismatch_probe.training_path.loading import load_config
from tests.tiny_models import FAMILIES, make_checkpoint

REARRANGED = ("qwen3-moe",)
"""Families whose weights transformers rearranges as it loads them, which are not judged."""


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_fits_and_without_one_weight_it_does_not(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    require_fit(folder, trust_remote_code=False)
    edit_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    refused = nullcontext() if family in REARRANGED else pytest.raises(UsageError, match=r"model\.norm\.weight")
    with refused:
        require_fit(folder, trust_remote_code=False)


def test_the_shipped_checkpoint_fits() -> None:
    require_fit(DEMO_CHECKPOINT, trust_remote_code=False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 352}, "model.embed_tokens.weight has shape 320 x 64, and the config asks for 352 x 64"),
        ({"hidden_size": 96}, "model.embed_tokens.weight has shape 320 x 64, and the config asks for 320 x 96"),
        ({"intermediate_size": 160}, "mlp.gate_proj.weight has shape 128 x 64, and the config asks for 160 x 64"),
        ({"num_hidden_layers": 3}, "weights of its architecture, such as model.layers.2."),
    ],
)
def test_a_config_of_another_shape(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    extra = {} if "num_hidden_layers" not in changes else {"layer_types": None, "max_window_layers": 3}
    edit_config(folder, **changes, **extra)
    with pytest.raises(UsageError, match=words):
        require_fit(folder, trust_remote_code=False)


def test_a_weight_that_is_missing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(UsageError, match=r"lacks 1 weight of its architecture, such as model\.norm\.weight"):
        require_fit(folder, trust_remote_code=False)


def test_a_head_that_is_tied_needs_no_weight_and_one_that_is_not_does(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", "qwen3")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    require_fit(tied, trust_remote_code=False)
    edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(UsageError, match=r"such as lm_head\.weight"):
        require_fit(tied, trust_remote_code=False)


def test_names_without_the_models_prefix_are_those_of_the_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")

    def strip(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    edit_weights(folder, strip)
    require_fit(folder, trust_remote_code=False)
    edit_weights(folder, lambda weights: weights.pop("norm.weight"))
    with pytest.raises(UsageError, match=r"lacks 1 weight .* model\.norm\.weight"):
        require_fit(folder, trust_remote_code=False)


def test_a_config_that_makes_no_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, hidden_act="nonesuch")
    with pytest.raises(UsageError, match="makes no model"):
        require_fit(folder, trust_remote_code=False)


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_name_that_transformers_does_not_know_is_told_with_its_field(tmp_path: Path, field: str) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, **{field: {"rope_type": "evil", "rope_theta": 10_000.0, "factor": 2.0}})
    with pytest.raises(UsageError, match=r"\(rope_parameters\.rope_type = 'evil' is none that transformers knows\)"):
        require_fit(folder, trust_remote_code=False)


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn2"])
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_checkpoint_asks_for_is_neither_needed_nor_fetched(
    tmp_path: Path, name: str, attention: str
) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, **{name: attention})
    require_fit(folder, trust_remote_code=False)
    assert load_config(folder, trust_remote_code=False)._attn_implementation is None


def test_quantised_weights_are_not_judged(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, hidden_size=96)
    with pytest.raises(UsageError, match="the config asks for"):
        require_fit(folder, trust_remote_code=False)
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    require_fit(folder, trust_remote_code=False)


def test_only_headers_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    path.write_bytes(content[: 8 + length] + b"\xff" * (len(content) - 8 - length))
    require_fit(folder, trust_remote_code=False)
    path.write_bytes(content[:8] + b"\xff" * (len(content) - 8))
    with pytest.raises(UsageError):
        require_fit(folder, trust_remote_code=False)
