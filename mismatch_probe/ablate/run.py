"""An ablation from its directory: started, resumed, its cells run, each in a process of its own."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.config.ablate import Ablation, GridCell
from mismatch_probe.config.model import SanitySettings
from mismatch_probe.engines.start import engine_provider
from mismatch_probe.errors import MismatchProbeError, RunDirectoryError, TrainingStopped, UsageError
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.guards.rules import recorded_guards
from mismatch_probe.notation import join_names
from mismatch_probe.provenance import environment
from mismatch_probe.records.ablation import AblationDirectory, AblationManifest, CellState
from mismatch_probe.records.files import write_text
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord
from mismatch_probe.report.training.page import write_training_report
from mismatch_probe.train.preparation import TrainingPreparation, prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training
from mismatch_probe.train.sanity import execute_sanity, prepare_sanity
from mismatch_probe.train.trackers import track
from mismatch_probe.train.trainer import StepListener

DONE: Final[tuple[CellState, ...]] = ("finished", "stopped")
_STOPPED: Final = "stopped: "
_MOST_NAMES: Final = 3


@dataclass(frozen=True)
class CellStep:
    """A step of a cell: the cell's number in the grid, from 1, and the means that a person wants to see."""

    number: int
    cell: GridCell
    step: int
    reward: float
    kl: float
    num_events: int


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended, and why where that is no finish. seconds: of this start."""

    number: int
    cell: GridCell
    state: CellState
    reason: str | None
    seconds: float


@dataclass(frozen=True)
class CellStart:
    """A cell whose process starts now."""

    number: int
    cell: GridCell


CellCallback = Callable[[CellStart | CellStep | CellEnd], None]


def default_ablation_path() -> Path:
    return Path("runs") / f"ablate-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def check_cells(ablation: Ablation) -> None:
    """Check the first cell of each variant as `train` would, so that a wrong one ends the command before any runs.

    Raises:
        UsageError: what is wrong, and of which cell.
    """
    for cells in ablation.variants().values():
        try:
            _prepare(ablation, cells[0])
        except UsageError as error:
            raise UsageError(f"cell {cells[0].name}: {error}") from error


def _prepare(
    ablation: Ablation, cell: GridCell, guard_tables: list[dict[str, Any]] | None = None
) -> TrainingPreparation:
    guards = recorded_guards(guard_tables, f"cell {cell.name}") or None if guard_tables else None
    if ablation.sanity is None:
        return prepare_training(cell.settings, guards)
    return prepare_sanity(cell.settings, ablation.sanity, guards)


def start_ablation(path: Path, ablation: Ablation) -> AblationDirectory:
    """Make the run directory."""
    directory = AblationDirectory(path)
    with directory.create():
        directory.write_ablation_manifest(
            AblationManifest(
                **environment.manifest_head(),
                settings=ablation.values,
                cells=[cell.name for cell in ablation.cells],
                versions=environment.versions(),
                hardware=environment.hardware(),
                git=environment.git_state(),
            )
        )
    _write_settings(directory, ablation)
    return directory


def resume_ablation(path: Path, ablation: Ablation) -> AblationDirectory:
    """The run directory of an earlier start; the grid may have grown.

    Raises:
        RunDirectoryError: a cell of the earlier start is not in the grid now, or has other settings.
    """
    directory = AblationDirectory(path)
    manifest = directory.read_ablation_manifest()
    names = [cell.name for cell in ablation.cells]
    if missing := [name for name in manifest.cells if name not in names]:
        raise RunDirectoryError(
            f"{path} has cells that the grid has not now ({join_names(missing, _MOST_NAMES)}); resume with at least "
            "the same grid (it is in manifest.json), or give another --out"
        )
    _write_settings(directory, ablation)
    directory.write_ablation_manifest(manifest.model_copy(update={"settings": ablation.values, "cells": names}))
    return directory


def _write_settings(directory: AblationDirectory, ablation: Ablation) -> None:
    for cell in ablation.cells:
        values = cell.settings.model_dump(mode="json", exclude_defaults=True)
        if ablation.sanity is not None:
            values["sanity"] = ablation.sanity.model_dump(mode="json")
        write_text(_settings_path(directory, cell.name), yaml.safe_dump(values, sort_keys=False))


def _settings_path(directory: AblationDirectory, name: str) -> Path:
    """What `train --config` takes to run the cell alone."""
    return directory.path / "settings" / f"{name}.yaml"


def cell_state(directory: AblationDirectory, cell: GridCell) -> CellState:
    """How far its own files say that it is; a broken one is unfinished to them."""
    run = directory.cell(cell.name)
    if not run.is_run:
        return "pending"
    manifest = run.read_training_manifest()
    if manifest.outcome.startswith(_STOPPED):
        return "stopped"
    is_done = manifest.outcome == "finished" and manifest.settings.steps >= cell.settings.steps
    return "finished" if is_done else "unfinished"


def execute_ablation(
    directory: AblationDirectory,
    ablation: Ablation,
    progress: CellCallback,
    after_cell: Callable[[], object],
    places: Sequence[Mapping[str, str]] = ({},),
) -> list[CellEnd]:
    """Run every cell that is not done, and say how those ended; after_cell is called once a cell's files are there.

    A cell that breaks is recorded with its reason, and the next one runs. A resume runs it again.

    places: as many cells run at once, each with the environment variables of the place that it takes.

    Raises:
        StorageError: the disk refused a file of the ablation itself.
        KeyboardInterrupt: passed on; what the cells have done stays.
    """
    ends: list[CellEnd] = []
    with directory.lock():
        to_run = [
            (number, cell) for number, cell in enumerate(ablation.cells, 1) if cell_state(directory, cell) not in DONE
        ]
        _record_at_once(directory, min(len(places), len(to_run)))
        began: dict[int, float] = {}

        def start_cell(index: int, place: int) -> start.Job:
            number, cell = to_run[index]
            progress(CellStart(number, cell))
            began[index] = time.monotonic()
            return _cell_job(directory, cell, places[place])

        def hear(index: int, message: Mapping[str, Any]) -> None:
            progress(CellStep(*to_run[index], **message))

        def end_cell(index: int, reason: str | None, failure: MismatchProbeError | None) -> None:
            state: CellState = "broken" if failure is not None else "finished" if reason is None else "stopped"
            words = reason if failure is None else str(failure)
            end = CellEnd(*to_run[index], state, words, time.monotonic() - began[index])
            _record(directory, end)
            ends.append(end)
            progress(end)
            after_cell()

        start.run_each(start_cell, len(to_run), len(places), hear, end_cell)
    return ends


def _cell_job(directory: AblationDirectory, cell: GridCell, environment: Mapping[str, str]) -> start.Job:
    return start.Job(
        name=f"cell {cell.name}",
        function=train_cell,
        arguments=(str(directory.path.absolute()), cell.name),
        preload=engine_provider(cell.settings.sampler.name).preload,
        when_killed="free memory or give a lower --at-once, and continue with --resume; or start anew with a lower "
        "--max-new-tokens, --samples-per-prompt or a smaller cache of the engine",
        log=directory.log_path(cell.name),
        environment=environment,
    )


def _record_at_once(directory: AblationDirectory, at_once: int) -> None:
    manifest = directory.read_ablation_manifest()
    if at_once > manifest.most_at_once:
        directory.write_ablation_manifest(manifest.model_copy(update={"most_at_once": at_once}))


def _record(directory: AblationDirectory, end: CellEnd) -> None:
    manifest = directory.read_ablation_manifest()
    name = end.cell.name
    failures = {other: reason for other, reason in manifest.failures.items() if other != name}
    if end.state == "broken":
        failures[name] = end.reason or ""
    seconds = manifest.seconds | {name: manifest.seconds.get(name, 0.0) + end.seconds}
    directory.write_ablation_manifest(manifest.model_copy(update={"failures": failures, "seconds": seconds}))


def train_cell(send: Send, path: str, name: str) -> str | None:
    """Run one cell to its end, in a process of its own; returns what a guard said that stopped it."""
    directory = AblationDirectory(Path(path))
    ablation = Ablation.of(directory.read_ablation_manifest().settings)
    cell = next(cell for cell in ablation.cells if cell.name == name)
    run = SanityDirectory(directory.cell(name).path)
    is_new = not run.is_run
    guards = None if is_new or cell.settings.guards is not None else run.read_training_manifest().guards
    preparation = _with_command(_prepare(ablation, cell, guards), directory, cell, ablation.sanity)

    record = _open_run(run, preparation, ablation.sanity, is_new=is_new)
    try:
        with track(run, preparation.settings, print) as trackers:
            listener = partial(_tell_step, send, trackers)
            if record is None:
                execute_training(run, preparation, listener)
            elif not record.passed:
                execute_sanity(run, preparation, record, listener, print)
    except TrainingStopped as stop:
        return str(stop)
    finally:
        write_training_report([run], run.report_path)
    return None


def _open_run(
    run: SanityDirectory, preparation: TrainingPreparation, sanity: SanitySettings | None, *, is_new: bool
) -> SanityRecord | None:
    """Start the run, or open it to go on; the record of a sanity test."""
    if sanity is None:
        (start_training if is_new else resume_training)(run.path, preparation)
        return None
    if not is_new:
        resume_training(run.path, preparation)
        return run.read_sanity()
    record = SanityRecord(settings=sanity)
    start_training(run.path, preparation, partial(run.write_sanity, record))
    return record


def _tell_step(
    send: Send, trackers: StepListener, step: int, metrics: Mapping[str, float], decision: StepFirings
) -> None:
    trackers(step, metrics, decision)
    reward, kl = (metrics.get(metric, math.nan) for metric in ("reward/mean", "mismatch/kl_k3"))
    send({"step": step, "reward": reward, "kl": kl, "num_events": len(decision.events)})


def _with_command(
    preparation: TrainingPreparation, directory: AblationDirectory, cell: GridCell, sanity: SanitySettings | None
) -> TrainingPreparation:
    """The cell's manifest names the command that runs it alone."""
    command = "train" if sanity is None else "sanity"
    words = ["mismatch-probe", command, "--config", str(_settings_path(directory, cell.name)), "--out", cell.name]
    return replace(preparation, manifest=preparation.manifest.model_copy(update={"command": words}))


def states(directory: AblationDirectory, ablation: Ablation) -> Iterator[tuple[GridCell, CellState, str | None]]:
    """Each cell, how far it is, and why where it is stopped or broken."""
    failures = directory.read_ablation_manifest().failures
    for cell in ablation.cells:
        state = cell_state(directory, cell)
        if state == "stopped":
            outcome = directory.cell(cell.name).read_training_manifest().outcome
            yield cell, state, outcome.removeprefix(_STOPPED)
        elif state not in DONE and cell.name in failures:
            yield cell, "broken", failures[cell.name]
        else:
            yield cell, state, None
