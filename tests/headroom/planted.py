"""Checkpoints with a planted lack of headroom, and an examination small enough for a test."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.examinations import HeadroomPrompts, HeadroomSampling, HeadroomSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.headroom.run import StageProgressCallback, measure_headroom
from mismatch_probe.records.examinations import Headroom
from tests.tiny_models import make_checkpoint

Change = Callable[[torch.Tensor], torch.Tensor] | float


def planted(folder: Path, family: str = "llama", *, changes: dict[str, Change]) -> Path:
    """A tiny model whose tensors with a name that holds a key of `changes` are multiplied, or changed by a function."""
    path = make_checkpoint(folder, family)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for part, change in changes.items():
        names = [name for name in tensors if part in name]
        assert names, f"{part} is in no tensor's name"
        for name in names:
            tensors[name] = change(tensors[name].clone()) if callable(change) else tensors[name] * change
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def examined(folder: Path | str, tell: StageProgressCallback = lambda *_: None, **settings: object) -> Headroom:
    """Two prompts, two short responses each."""
    return measure_headroom(
        HeadroomSettings(
            **{
                "model": ModelSettings(path=str(folder)),
                "prompts": HeadroomPrompts(source="sums:easy", num_prompts=2),
                "sampling": HeadroomSampling(samples_per_prompt=2, max_new_tokens=12),
                **settings,
            }
        ),
        tell,
    )
