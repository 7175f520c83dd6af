"""One real run of `train`, small, with or without a fault, and what is kept of it."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from benchmarks.training_faults.injection import Inject, Now, optimizer_of, replaced, swapped
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.nested import merged
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, TrainingStopped, UsageError
from mismatch_probe.guards.decision import StepFirings
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train import run as run_module
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training
from mismatch_probe.train.state import Adjustments

SMALL: Final[dict[str, Any]] = {
    "model": {"path": "demo"},
    "task": {"source": "sums:terms=3", "num_problems": 64},
    "rollout": {"prompts": 8, "samples": 4, "max_new_tokens": 40},
    "objective": {"name": "pg-seq-is"},
    "optimizer": {"learning_rate": 1e-4},
    "checkpoint": {"every": 4},
}


@dataclass
class Seen:
    """What each step started with: digests of the weights and of AdamW's moments; and what it decided."""

    weights: dict[int, str] = field(default_factory=dict)
    moments: dict[int, str] = field(default_factory=dict)
    decisions: dict[int, StepFirings] = field(default_factory=dict)
    assembled: list[Adjustments] = field(default_factory=list)


@dataclass(frozen=True)
class LabRun:
    """A run's files, what was seen while it ran, and the sentence a guard stopped it with, or it failed with."""

    directory: TrainingDirectory
    seen: Seen
    stopped: str | None
    failed: str | None = None

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return dict(self.directory.read_metrics())


def checkpoint_steps(run: Path) -> list[int]:
    return Checkpoints(TrainingDirectory(run).checkpoints_path, keep=2).steps()


def checkpoint_path(run: Path, step: int) -> Path:
    return Checkpoints(TrainingDirectory(run).checkpoints_path, keep=2).model_path(step).parent


def small_settings(dtype: Dtype, *, seed: int, steps: int, **changes: Any) -> TrainSettings:
    """A run of seconds on the demo checkpoint."""
    own = {"train_dtype": dtype, "infer_dtype": dtype, "seed": seed, "steps": steps}
    return parse_settings(TrainSettings, merged(merged(SMALL, own), changes))


def run_with(
    path: Path,
    settings: TrainSettings,
    inject: Inject | None = None,
    now: Now | None = None,
    guards: Sequence[GuardSettings] | None = None,
    *,
    resume: bool = False,
) -> LabRun:
    """Train in this process, from the start unless `resume`; `guards` take the place of the default ones."""
    preparation = prepare_training(settings)
    if guards is not None:
        preparation = replace(preparation, guards=tuple(guards))
    now, seen = now or Now(settings.steps + 1), Seen()

    def watch(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        seen.decisions[step] = decision
        now.step = step + 1

    @contextmanager
    def watched_parts(assembled: Any, preparation: Any, adjustments: Adjustments) -> Iterator[TrainingParts]:
        seen.assembled.append(adjustments)
        with assembled(preparation, adjustments) as parts:
            _watch_starts(parts, now, seen)
            if inject is not None:
                inject(parts, now)
            yield parts

    if not resume:
        shutil.rmtree(path, ignore_errors=True)
    directory = (resume_training if resume else start_training)(path, preparation)
    stopped = failed = None
    with swapped(run_module, "assembled", lambda real: lambda *given: watched_parts(real, *given)):
        try:
            execute_training(directory, preparation, watch)
        except TrainingStopped as stop:
            stopped = str(stop)
        except (UsageError, EngineError) as error:
            failed = str(error)
    return LabRun(directory, seen, stopped, failed)


def _watch_starts(parts: TrainingParts, now: Now, seen: Seen) -> None:
    """A step starts by sending weights; what it sends first is what it holds."""

    def make(send: Any) -> Any:
        def after_a_look() -> None:
            if now.step not in seen.weights:
                seen.weights[now.step] = weights_digest(dict(parts.policy.weights()))
                seen.moments[now.step] = moments_digest(optimizer_of(parts).adamw)
            send()

        return after_a_look

    replaced(parts.sync, "send", make)


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    return digest_of(part for name in sorted(weights) for part in (name, weights[name]))


def moments_digest(adamw: torch.optim.AdamW) -> str:
    states = [adamw.state.get(parameter, {}) for parameter in adamw.param_groups[0]["params"]]
    return digest_of(part for state in states for name in sorted(state) for part in (name, _local(state[name])))


def digest_of(parts: Iterable[str | torch.Tensor | npt.NDArray[Any]]) -> str:
    """SHA-256 of texts and of numbers' bits."""
    digest = hashlib.sha256()
    for part in parts:
        array = part.detach().contiguous().numpy() if isinstance(part, torch.Tensor) else part
        digest.update(array.encode() if isinstance(array, str) else array.tobytes())
    return digest.hexdigest()


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
