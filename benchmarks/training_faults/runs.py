"""One real run of `train`, small, with or without a fault, and what is kept of it."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.training_faults.injection import Inject, Now, swapped
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.train import CheckpointSettings, TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, TrainingStopped, UsageError
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.reading import merge_tables
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train import run as run_module
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.learner import Adjustments
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training

SMALL: Final[dict[str, Any]] = {
    "model": {"path": "demo"},
    "task": {"source": "sums:terms=3", "num_problems": 64},
    "rollout": {"prompts": 8, "samples": 4, "max_new_tokens": 40},
    "objective": {"name": "pg-seq-is"},
    "optimizer": {"learning_rate": 1e-4},
    "checkpoint": {"every": 4},
}
KEEP: Final = CheckpointSettings().keep


@dataclass(frozen=True)
class LabRun:
    """A run's files, and the sentence a guard stopped it with, or it failed with.

    decisions: of each step. assembled: what guards had changed each time that its parts were put together.
    """

    directory: TrainingDirectory
    stopped: str | None
    failed: str | None
    decisions: dict[int, StepFirings]
    assembled: list[Adjustments]

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
    return parse_settings(TrainSettings, merge_tables(merge_tables(SMALL, own), changes))


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
    now = now or Now(settings.steps + 1)
    decisions: dict[int, StepFirings] = {}
    assembled: list[Adjustments] = []

    def watch(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        decisions[step] = decision
        now.step = step + 1

    @contextmanager
    def faulty_parts(real: Any, preparation: Any, adjustments: Adjustments) -> Iterator[TrainingParts]:
        assembled.append(adjustments)
        with real(preparation, adjustments) as parts:
            if inject is not None:
                inject(parts, now)
            yield parts

    if not resume:
        shutil.rmtree(path, ignore_errors=True)
    directory = (resume_training if resume else start_training)(path, preparation)
    stopped = failed = None
    with swapped(run_module, "assemble", lambda real: lambda *arguments: faulty_parts(real, *arguments)):
        try:
            execute_training(directory, preparation, watch)
        except TrainingStopped as stop:
            stopped = str(stop)
        except (UsageError, EngineError) as error:
            failed = str(error)
    return LabRun(directory, stopped, failed, decisions, assembled)


def branched(run: Path, path: Path, step: int, every: int) -> int:
    """Copy a run to `path` as it was before `step` if it had taken a checkpoint every `every` steps; the newest of
    these, after which it goes on, is returned.

    Resumed, the copy goes on as the run did, bit for bit.
    """
    shutil.rmtree(path, ignore_errors=True)
    kept = [saved for saved in checkpoint_steps(run) if saved < step and saved % every == 0]
    others = [checkpoint_path(run, saved).name for saved in checkpoint_steps(run) if saved not in kept]
    shutil.copytree(run, path, ignore=shutil.ignore_patterns(*others))
    directory = TrainingDirectory(path)
    manifest = directory.read_training_manifest()
    checkpoint = manifest.settings.checkpoint.model_copy(update={"every": every, "keep": KEEP})
    settings = manifest.settings.model_copy(update={"checkpoint": checkpoint})
    directory.write_training_manifest(manifest.model_copy(update={"settings": settings}))
    return kept[-1]
