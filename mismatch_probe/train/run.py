"""One training run from its directory: started, resumed, assembled again where a guard raised a precision."""

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from mismatch_probe.errors import MismatchProbeError, RunDirectoryError, TrainingStopped
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.guards.guards import Guards
from mismatch_probe.reading import differences
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.distributed import as_first_rank_has_it, is_main, join_process_group, rank, world_size
from mismatch_probe.train.learner import Adjustments
from mismatch_probe.train.parts import assemble
from mismatch_probe.train.preparation import TrainingPreparation, free_to_change, with_typed_engines
from mismatch_probe.train.trainer import Goal, StepListener, Trainer
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.rank_group import lost_ranks_named

_WAIT_SECONDS: Final = 0.1
_SIGHT_SECONDS: Final = 60


def start_training(
    path: Path, preparation: TrainingPreparation, write_first: Callable[[], None] = lambda: None
) -> TrainingDirectory:
    """Make the run directory; the other ranks wait for the first, which makes it. write_first: files that make it a run
    of another kind.

    Raises:
        MismatchProbeError: on every rank, what kept the first one from making it.
        RunDirectoryError: this rank's node does not see it.
        RankLost: the first rank is lost.
    """
    directory = TrainingDirectory(path)
    if world_size() == 1:
        _make(directory, preparation, write_first)
        return directory
    join_process_group(choose_device(preparation.settings.policy.device))
    refusal = None
    if is_main():
        try:
            _make(directory, preparation, write_first)
        except MismatchProbeError as error:
            refusal = error
    with lost_ranks_named():
        refusal = as_first_rank_has_it(refusal)
    if refusal is not None:
        raise refusal
    _wait_until_in_sight(directory)
    return directory


def _make(directory: TrainingDirectory, preparation: TrainingPreparation, write_first: Callable[[], None]) -> None:
    with directory.create():
        write_first()
        directory.write_training_manifest(preparation.manifest)


def _wait_until_in_sight(directory: TrainingDirectory) -> None:
    """A file system of several machines may show a file later than it was written."""
    until = time.monotonic() + _SIGHT_SECONDS
    while not directory.is_run:
        if time.monotonic() > until:
            raise RunDirectoryError(
                f"the first rank made {directory.path}, and rank {rank()} does not see it after {_SIGHT_SECONDS} s; "
                "give --out on a file system that all nodes share"
            )
        time.sleep(_WAIT_SECONDS)


def resume_training(path: Path, preparation: TrainingPreparation) -> TrainingDirectory:
    """The run directory of an earlier start.

    Raises:
        RunDirectoryError: there is none, it is of another model, other settings, problems or guards, or it has taken
            more steps than are asked for.
    """
    directory = TrainingDirectory(path)
    manifest = directory.read_training_manifest()
    free = free_to_change(preparation.settings)
    old, new = (
        settings.model_dump(mode="json", exclude=free)
        for settings in (with_typed_engines(manifest.settings), preparation.settings)
    )
    old_keys, keys = manifest.content_keys, preparation.manifest.content_keys
    changes = [name for name in {**keys, **old_keys} if name != "settings" and old_keys.get(name) != keys.get(name)]
    if names := [name for name, *_ in differences(old, new)]:
        changes.insert(0, f"settings ({', '.join(names)})")
    if changes:
        raise RunDirectoryError(
            f"{path} was started with other {' and '.join(changes)}; resume with the same ones (they are in "
            "manifest.json), or give another --out"
        )
    checkpoints = Checkpoints(directory.checkpoints_path, keep=preparation.settings.checkpoint.keep)
    last_step = max(checkpoints.steps(), default=0)
    if last_step > preparation.settings.steps:
        raise RunDirectoryError(
            f"{path} has taken {last_step} steps, and --steps asks for {preparation.settings.steps}; give at least "
            f"{last_step}, or another --out for a shorter run"
        )
    if last_step in checkpoints.steps():
        checkpoints.require_readable(last_step)
    return directory


def execute_training(
    directory: TrainingDirectory, preparation: TrainingPreparation, watch: StepListener, goal: Goal | None = None
) -> None:
    """Train to the last step or the goal, from the newest checkpoint where there is one, as the manifest then says."""

    def listener(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        if is_main():
            directory.append_metrics(step, metrics)
            for event in decision.events:
                directory.append(directory.events_path, event.as_json())
        watch(step, metrics, decision)

    with lost_ranks_named(), directory.lock() if is_main() else nullcontext():
        _record(directory, settings=preparation.settings, outcome="unfinished")
        while not _train_assembled(directory, preparation, listener, goal):
            gc.collect()
        _record(directory, outcome="finished")


def _train_assembled(
    directory: TrainingDirectory, preparation: TrainingPreparation, listener: StepListener, goal: Goal | None
) -> bool:
    """Train until the run ends, or, then False, until other parts are needed; nothing of these is left in memory."""
    join_process_group(choose_device(preparation.settings.policy.device))
    checkpoints = Checkpoints(directory.checkpoints_path, keep=preparation.settings.checkpoint.keep)
    newest = max(checkpoints.steps(), default=None)
    adjustments = Adjustments() if newest is None else checkpoints.adjustments(newest)
    if is_main():
        directory.forget_after(newest or 0)
    with assemble(preparation, adjustments) as parts:
        _record(directory, effective=parts.effective())
        guards = Guards(preparation.guards, can=list(ActionKind))

        def listen(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
            if step == 1:
                _record(
                    directory, guards_off={name: list(missing_metrics) for name, missing_metrics in guards.off.items()}
                )
            listener(step, metrics, decision)

        trainer = Trainer(parts, preparation.settings, guards, checkpoints, adjustments, listen, goal)
        if newest is not None:
            trainer.resume(newest)
        try:
            return trainer.run()
        except TrainingStopped as stop:
            _record(directory, outcome=f"stopped: {stop}")
            raise


def _record(directory: TrainingDirectory, **changes: object) -> None:
    if is_main():
        manifest = directory.read_training_manifest()
        directory.write_training_manifest(manifest.model_copy(update=changes))
