"""What an adapter's folder says, and which adapters are refused before anything is loaded."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.stored_tensors import CONFIG, WEIGHTS, read_adapter

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / CONFIG).write_text(json.dumps({**PLAIN, "base_model_name_or_path": "somewhere"}))
    tensors = {
        f"base_model.model.model.layers.0.self_attn.{name}.lora_{part}.weight": torch.ones(*shape)
        for name in ("q_proj", "v_proj")
        for part, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    save_file(tensors, path / WEIGHTS)
    return path


def change(folder: Path, **changes: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **changes}))
    return folder


def test_an_adapter_is_read_from_its_files(folder: Path) -> None:
    adapter = read_adapter(folder)
    assert (adapter.rank, adapter.alpha, adapter.names) == (2, 4.0, ["q_proj", "v_proj"])
    assert adapter.modules == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")


def test_the_fingerprint_tells_what_is_computed_and_not_where_it_lies(folder: Path, tmp_path: Path) -> None:
    fingerprint = read_adapter(folder).fingerprint
    elsewhere = Path(copytree(folder, tmp_path / "elsewhere"))
    change(elsewhere, target_modules=["v_proj", "q_proj"], base_model_name_or_path="moved")
    assert read_adapter(elsewhere).fingerprint == fingerprint
    assert read_adapter(change(elsewhere, lora_alpha=8)).fingerprint != fingerprint
    assert read_adapter(change(elsewhere, use_rslora=True)).fingerprint != fingerprint
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = 2.0
    save_file(tensors, folder / WEIGHTS)
    assert read_adapter(folder).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "only LORA adapters"),
        ({"use_dora": True}, "use_dora = True, which vLLM does not serve"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"r": 0}, "r = 0, which is no positive number"),
        ({"lora_alpha": "much"}, "lora_alpha = 'much'"),
    ],
)
def test_what_both_sides_would_not_apply_alike_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_adapter(change(folder, **changes))


def test_a_folder_without_one_and_a_damaged_one_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no adapter: it has no adapter_config\.json"):
        read_adapter(tmp_path)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])
    with pytest.raises(UsageError, match="not an intact safetensors file"):
        read_adapter(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UsageError, match=r"holds no adapter_model\.safetensors"):
        read_adapter(folder)


def test_an_adapter_of_the_head_is_refused(folder: Path) -> None:
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}, folder / WEIGHTS)
    with pytest.raises(UsageError, match=r"holds base_model\.model\.lm_head\.lora_A\.weight"):
        read_adapter(folder)
