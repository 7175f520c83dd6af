"""The checkpoints that faults are injected into, and edited copies of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.tasks import resolve_model
from mismatch_probe.verdict.codes import Code
from tests.tiny_models import make_checkpoint

MODELS = ("llama", "qwen3-moe", "demo", "qwen2", "qwen3", "mistral-sliding")
"""Random architectures with sharp distributions, one of them a mixture of experts, and the trained demo model."""

IN_THE_ENGINE = ("llama", "qwen3-moe", "demo")
"""Models whose engine is given faults, which costs two starts each."""

HELD_OUT = ("qwen3", "mistral-sliding")
"""Models on which no threshold of the verdict was chosen."""

TINY = tuple(model for model in MODELS if model != "demo")
PROMPTS = {"demo": "sums:long"} | dict.fromkeys(TINY, "sums:terms=2-6")

_SYSTEM = [ord(letter) for letter in "You are helpful. "]
SOME_TOKENS = {"demo": (7, [5, 9, 11, 7, 13, 8, 6, 12])} | dict.fromkeys(TINY, (257, _SYSTEM))
"""A token to put before a prompt, and a piece of text."""


def _window(layers: int, size: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": ["sliding_attention"] * layers}


CONFIGS: dict[str, list[tuple[str, Code, str, dict[str, Any]]]] = {
    "llama": [("norm epsilon", Code.UNEXPLAINED, "1e-3 for 1e-6", {"rms_norm_eps": 1e-3})],
    "qwen3-moe": [
        ("experts a token", Code.ROUTING, "1 for 2", {"num_experts_per_tok": 1}),
        ("sliding window", Code.POSITIONS, "24 tokens", _window(2, 24)),
    ],
    "demo": [("sliding window", Code.POSITIONS, "64 tokens", _window(4, 64))],
    "qwen2": [],
    "qwen3": [("sliding window", Code.POSITIONS, "24 tokens", _window(2, 24))],
    "mistral-sliding": [("sliding window", Code.POSITIONS, "24 for 16 tokens", {"sliding_window": 24})],
}
"""Settings of the forward pass that only some architectures have: fault, cause, strength, and the keys changed."""


def checkpoint(name: str, scratch: Path) -> Path:
    """The folder of a model, made on first use."""
    if name == "demo":
        return resolve_model(ModelSettings(path="demo"))
    folder = scratch / "checkpoints" / name
    return folder if folder.exists() else make_checkpoint(folder, name)


def with_config(folder: Path, target: Path, **changes: object) -> Path:
    """A copy whose config.json has these keys; a dict is merged into the one that is there."""
    copy = _copied(folder, target)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = {**(config.get(key) or {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
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
