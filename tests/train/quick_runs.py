"""Whole training runs in a second or two: a tiny checkpoint, and transformers behind the engine's interface."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.records.files import write_text
from mismatch_probe.records.sequences import SampledSequence, SampleRequest
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training
from tests.train.model_engine import ModelEngine

REWARDS = """
def even(prompt, response, answer):
    return float(len(response) % 2 == 0)

def undefined(prompt, response, answer):
    return float("nan")
"""
Steps = list[dict[str, float]]
StartEngine = Callable[[Path], ModelEngine]


class StoppingEngine(ModelEngine):
    """Every response ends by itself, whatever its last token."""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        return [replace(one, finish_reason="stop") for one in super().sample(requests, sampling)]


class BfloatEngine(StoppingEngine):
    """It computes in BF16, so that it rounds otherwise than a trainer in FP32 on every processor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = self.model.bfloat16()


def quick_home(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: StartEngine = StoppingEngine) -> Path:
    """`folder` with problems and rewards, and a quick engine wherever one is started; no token ends its responses.

    Files appear whole, since ranks that share the folder read them while another one writes them again.
    """

    @contextmanager
    def start(checkpoint: str, *_: Any, **__: Any) -> Iterator[ModelEngine]:
        yield engine(Path(checkpoint))

    monkeypatch.setattr("mismatch_probe.train.parts.start_engine", start)
    monkeypatch.setattr("mismatch_probe.train.parts.end_token_ids", lambda *_: frozenset())
    monkeypatch.syspath_prepend(folder)
    write_text(folder / "lengths_as_rewards.py", REWARDS)
    rows = [json.dumps({"prompt": f"{number} + {number} = "}) for number in range(8)]
    write_text(folder / "problems.jsonl", "\n".join(rows))
    return folder


def quick_settings(folder: Path, home: Path, steps: int, **changes: Any) -> TrainSettings:
    given: dict[str, Any] = {
        "model": {"path": str(folder)},
        "task": {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": "lengths_as_rewards:even"},
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 4},
        "objective": {"name": "pg-seq-is"},
        "optimizer": {"learning_rate": 1e-4},
        "train_dtype": "fp32",
        "infer_dtype": "fp32",
        "checkpoint": {"every": 2},
        "steps": steps,
    }
    return TrainSettings.model_validate({**given, **changes})


def guard_file(folder: Path, *tables: str, defaults: bool = False) -> Path:
    """A guard file of these `[[guard]]` tables."""
    path = folder / "guards.toml"
    text = [f"defaults = {str(defaults).lower()}", *(f"[[guard]]\n{table}" for table in tables)]
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def train(path: Path, wanted: TrainSettings, *, resume: bool = False) -> Steps:
    """What every step recorded, but for the time it took."""
    preparation = prepare_training(wanted)
    directory = (resume_training if resume else start_training)(path, preparation)
    execute_training(directory, preparation, lambda *_: None)
    return recorded(path)


def recorded(path: Path) -> Steps:
    return [
        {name: value for name, value in metrics.items() if not name.startswith("time/")}
        for _, metrics in TrainingDirectory(path).read_metrics()
    ]
