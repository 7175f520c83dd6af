"""The checkpoints that faults are injected into, and edited copies of them."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.tasks import resolve_model
from tests.tiny_models import make_checkpoint

MODELS = ("llama", "qwen3-moe", "demo", "qwen2", "qwen3", "mistral-sliding")
"""Random architectures with sharp distributions, one of them a mixture of experts, and the trained demo model. Any
other name is the folder of a real checkpoint."""

FAULTLESS_ENGINE = ("qwen2", "qwen3", "mistral-sliding")
"""Models whose engine is given no faults, which cost two starts each."""

HELD_OUT = ("qwen3", "mistral-sliding")
"""Models on which no threshold of the verdict was chosen."""

CHATS = "examples/prompts/chats.jsonl"
PROMPTS = {"demo": "sums:long"} | {model: "sums:terms=2-6" for model in MODELS if model != "demo"}
_SYSTEM = "You are helpful. "


@dataclass(frozen=True)
class SomeTokens:
    """The token that starts texts, another one that does not, one that pads, and a piece of text."""

    start: int
    other: int
    pad: int
    text: list[int]


def some_tokens(model: str, folder: Path) -> SomeTokens:
    """Of the demo model, of the tiny ones, which have one tokenizer, or by the tokenizer of a real checkpoint."""
    if model == "demo":
        return SomeTokens(7, 7, 0, [5, 9, 11, 7, 13, 8, 6, 12])
    if model in MODELS:
        return SomeTokens(257, 257, 256, [ord(letter) for letter in _SYSTEM])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(_SYSTEM, add_special_tokens=False).input_ids
    return SomeTokens(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, text)


Config = tuple[str, Code, str, dict[str, Any]]
"""A setting of the forward pass that only some architectures have: fault, cause, strength, and the keys changed."""


def _window(layers: int, size: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": ["sliding_attention"] * layers}


_CONFIGS: dict[str, list[Config]] = {
    "llama": [("norm epsilon", Code.CONFIGURATION, "1e-3 for 1e-6", {"rms_norm_eps": 1e-3})],
    "qwen3-moe": [
        ("experts a token", Code.ROUTING, "1 for 2", {"num_experts_per_tok": 1}),
        ("sliding window", Code.POSITIONS, "24 tokens", _window(2, 24)),
    ],
    "demo": [("sliding window", Code.POSITIONS, "64 tokens", _window(4, 64))],
    "qwen2": [],
    "qwen3": [("sliding window", Code.POSITIONS, "24 tokens", _window(2, 24))],
    "mistral-sliding": [("sliding window", Code.POSITIONS, "24 for 16 tokens", {"sliding_window": 24})],
}


def configs(model: str, folder: Path) -> Iterator[Config]:
    if model in MODELS:
        yield from _CONFIGS[model]
        return
    config = read_config(folder)
    epsilon = {"rms_norm_eps": 1e-2}
    yield "norm epsilon", Code.CONFIGURATION, f"1e-2 for {config['rms_norm_eps']:.0e}", epsilon
    if window := config.get("sliding_window"):
        yield "sliding window", Code.POSITIONS, f"24 for {window} tokens", {"sliding_window": 24}


def rope(folder: Path, *, times: float = 1.0, **more: Any) -> dict[str, Any]:
    """The checkpoint's `rope_parameters` with a base of so many times its own, and with `more`: of all layers, or of
    each kind of layers where the config tells them apart.
    """
    rope_parameters = read_config(folder)["rope_parameters"]
    if "rope_theta" in rope_parameters:
        return _rope_of(rope_parameters, times, more)
    return {kind: _rope_of(item, times, more) for kind, item in rope_parameters.items()}


def _rope_of(rope_parameters: dict[str, Any], times: float, more: dict[str, Any]) -> dict[str, Any]:
    return rope_parameters | {"rope_theta": rope_parameters["rope_theta"] * times} | more


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def checkpoint(name: str, scratch: Path) -> Path:
    """The folder of a model, made on first use; of a real one, as given."""
    if name == "demo":
        return resolve_model(ModelSettings(path="demo"))
    if name not in MODELS:
        return Path(name).resolve()
    folder = scratch / "checkpoints" / name
    return folder if folder.exists() else make_checkpoint(folder, name)


def with_config(folder: Path, target: Path, **changes: object) -> Path:
    """A copy whose config.json has these keys; a dict is merged into the one that is there."""
    copy = _copied(folder, target)
    config = read_config(copy)
    for key, value in changes.items():
        config[key] = {**(config.get(key) or {}), **value} if isinstance(value, dict) else value
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def with_weights(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy whose weights went through `change`, in FP32."""
    copy = _copied(folder, target)
    path = copy / "model.safetensors"
    weights = {name: change(name, tensor.float()).contiguous() for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return with_config(copy, copy, dtype="float32")


def _copied(folder: Path, target: Path) -> Path:
    if target != folder:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    return target
