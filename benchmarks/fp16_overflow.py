"""Models that overflow FP16: does `headroom` say so before training, and do the guards of an FP16 run see it?

`python -m benchmarks.fp16_overflow SCRATCH` publishes `reports/fp16-overflow.md`. Real vLLM on the sampling side.
"""

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from benchmarks.training_faults.runs import run_with
from mismatch_probe.config.examinations import HeadroomPrompts, HeadroomSampling, HeadroomSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.headroom.run import measure_headroom
from mismatch_probe.notation import write_number
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.tasks import resolve_model
from tests.tiny_models import make_checkpoint

STEPS: Final = 18
PROMPTS: Final = 8
RESIDUAL_TIMES: Final = 2.0**12
"""Takes the demo model's residual stream past 65,504 behind layer 1 and leaves it below that behind layer 0."""
WRITES_TO_RESIDUAL: Final = ("embed_tokens", "o_proj", "down_proj")
GRADIENT_TIMES: Final = {
    "embed_tokens": 2.0**-12,
    "o_proj": 2.0**-12,
    "layers.0.mlp.down_proj": 2.0**-12,
    "layers.1.mlp.gate_proj": 2.0**-10,
    "layers.1.mlp.up_proj": 2.0**-10,
    "layers.1.mlp.down_proj": 2.0**16,
}
"""Small activations before large weights: the forward pass stays finite, and the gradient grows on its way back."""


def by_chance(prompt: str, response: str, answer: str) -> float:
    """A reward that an untrained model earns half of the time."""
    return float(zlib.crc32(response.encode()) % 2)


def plain_demo(folder: Path) -> Path:
    """The demo model as it is."""
    shutil.copytree(resolve_model(ModelSettings(path="demo")), folder)
    return folder


def large_activations(folder: Path) -> Path:
    """The demo model with its residual stream scaled up: norms make it the same function in FP32 and BF16."""
    plain_demo(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    for name, tensor in tensors.items():
        if any(part in name for part in WRITES_TO_RESIDUAL):
            tensors[name] = tensor * RESIDUAL_TIMES
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def large_gradients(folder: Path) -> Path:
    """A random model whose forward pass is finite in FP16 and whose backward pass is not, at any loss scale."""
    make_checkpoint(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = load_file(file)
    for part, times in GRADIENT_TIMES.items():
        tensors |= {name: tensor * times for name, tensor in tensors.items() if part in name}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Model:
    """A checkpoint to make, how it is rewarded, and the length in which it ends its responses."""

    name: str
    make: Callable[[Path], Path]
    reward: str | None
    max_new_tokens: int
    learns_in: tuple[Dtype, ...]


MODELS: Final = (
    Model("the demo model", plain_demo, None, 40, (Dtype.FP16,)),
    Model("activations past 65,504 from layer 1 on", large_activations, None, 40, (Dtype.FP16, Dtype.BF16)),
    Model(
        "finite forward, infinite backward",
        large_gradients,
        "benchmarks.fp16_overflow:by_chance",
        160,
        (Dtype.FP16, Dtype.BF16),
    ),
)


@dataclass(frozen=True)
class Trained:
    """What came of a run: guards with their first step, why it stopped, the share of updates that were lost."""

    dtype: Dtype
    guards: dict[str, int]
    stopped: str | None
    steps: int
    overflows: int


def examined(folder: Path, num_prompts: int = 4) -> Headroom:
    """What `headroom` says, with few prompts."""
    settings = HeadroomSettings(
        model=ModelSettings(path=str(folder)),
        prompts=HeadroomPrompts(source="sums:easy", num_prompts=num_prompts),
        sampling=HeadroomSampling(samples_per_prompt=4, max_new_tokens=24),
    )
    return measure_headroom(settings, lambda *_: None)


def trained(
    folder: Path, model: Model, dtype: Dtype, scratch: Path, *, steps: int = STEPS, prompts: int = PROMPTS
) -> Trained:
    """A run of `train` in a dtype on both sides, with its default guards and `prompts` a step."""
    settings: dict[str, Any] = {
        "model": {"path": str(folder)},
        "task": {"source": "sums:terms=3", "num_problems": 32},
        "rollout": {"prompts": prompts, "samples": 4, "max_new_tokens": model.max_new_tokens},
        "objective": {"name": "pg-seq-is"},
        "optimizer": {"learning_rate": 1e-5},
        "train_dtype": dtype,
        "infer_dtype": dtype,
        "steps": steps,
    }
    if model.reward is not None:
        settings["task"]["reward"] = model.reward
    run = run_with(scratch / f"{folder.name}-{dtype}", parse_settings(TrainSettings, settings))
    guards: dict[str, int] = {}
    for event in run.directory.read_events():
        guards.setdefault(event["guard"], event["step"])
    overflows = sum(values.get("optim/overflow", 0.0) > 0 for values in run.metrics.values())
    return Trained(dtype, guards, run.stopped, len(run.metrics), overflows)


def publish(scratch: Path, path: Path) -> None:
    lines = [
        "# Models that overflow FP16",
        "",
        "`headroom` looks before training; then `train` runs in FP16 on both sides (real vLLM) with its default",
        f"guards, {STEPS} steps, and in BF16 as the control. The second model is the demo model with its residual",
        f"stream scaled by {RESIDUAL_TIMES:,.0f}, the same function in FP32; the third is random, with small",
        "activations before large weights.",
        *(
            line
            for number, model in enumerate(MODELS)
            for line in _chapter(model, scratch / f"model-{number}", scratch)
        ),
        "",
        "Made by `python -m benchmarks.fp16_overflow SCRATCH`.",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _chapter(model: Model, folder: Path, scratch: Path) -> list[str]:
    examination = examined(model.make(folder))
    assert examination.activations is not None
    residual = ", ".join(write_number(layer.residual) for layer in examination.activations.layers)
    runs = [trained(folder, model, dtype, scratch) for dtype in model.learns_in]
    table = [
        f"| {run.dtype} | {run.steps} of {STEPS} | {run.overflows} | "
        f"{', '.join(f'{name} ({step})' for name, step in run.guards.items()) or 'none'} |"
        for run in runs
    ]
    return [
        "",
        f"## {model.name[0].upper()}{model.name[1:]}",
        "",
        f"`headroom`: **{examination.verdict.code}**. {examination.verdict.sentence}",
        "",
        f"Largest of the residual stream behind each layer: {residual}.",
        "",
        "| trained in | steps done | updates lost | guards, with the step each first fired at |",
        "|---|---|---|---|",
        *table,
        *(line for run in runs if run.stopped for line in ("", f"{run.dtype}: {run.stopped}")),
    ]


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path("reports/fp16-overflow.md"))
