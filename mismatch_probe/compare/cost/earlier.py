"""What is known before any forecast: stages of earlier runs, and which stages hold one layer at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.compare.cost.architecture import Architecture, ResponseLengths, Workload, workload_of
from mismatch_probe.compare.cost.rates import Calibration, Work
from mismatch_probe.compare.cost.stage_work import What, hidden_bytes, what_of, work_of
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.stages import ScoreStage, Stage
from mismatch_probe.config.model import HIDDEN_SHARE
from mismatch_probe.errors import BrokenRecord, MismatchProbeError
from mismatch_probe.notation import write_size
from mismatch_probe.records import kinds
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table

_MOST_RUNS: Final = 4
_MOST_FOLDERS: Final = 50
_MOST_SECONDS: Final = 1e9


@dataclass(frozen=True)
class Measurement:
    """A stage that was run: what it had to compute, and what that took. start_seconds: before its first batch, None
    where that is not recorded.
    """

    what: What
    work: Work
    seconds: float
    start_seconds: float | None


@dataclass(frozen=True)
class EarlierRun:
    """Its responses came from prompts_source and had at most limit_tokens each."""

    path: Path
    prompts_source: str
    limit_tokens: int
    responses: ResponseLengths
    stages: tuple[Measurement, ...]


def earlier_runs(folder: Path, manifest: Manifest, architecture: Architecture) -> list[EarlierRun]:
    """The newest comparisons in a folder of runs that say something of this one: a model of the same architecture and
    size, on the same hardware. What cannot be read says nothing.
    """
    runs = []
    for path in _newest_first(folder):
        run = RunDirectory(path)
        try:
            if kinds.kind_of(path) not in kinds.COMPARISONS:
                continue
            other = run.read_manifest()
            if _is_alike(other, manifest) and (responses := _responses(run, other)) is not None:
                runs.append(_read(run, other, architecture, responses))
        except MismatchProbeError:
            continue
        if len(runs) == _MOST_RUNS:
            break
    return runs


def _newest_first(folder: Path) -> list[Path]:
    manifests = sorted(folder.glob("*/manifest.json"), key=_modified, reverse=True)
    return [path.parent for path in manifests[:_MOST_FOLDERS]]


def _modified(path: Path) -> float:
    """When a file was written; one that is gone by now is the oldest."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _list_lengths(path: Path, column: str) -> npt.NDArray[np.float64]:
    """Of each list in a column.

    Raises:
        BrokenRecord: there is no such column, or no list in it.
    """
    table = read_table(path, columns=[column])
    if column in table.column_names and pa.types.is_list(table[column].type):
        lengths = np.asarray(pc.list_value_length(table[column].drop_null()), dtype=np.float64)
        if len(lengths):
            return lengths
    raise BrokenRecord(f"{path} has no {column}; make the run again")


def _is_a_time(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and 0 < seconds < _MOST_SECONDS


def _is_alike(other: Manifest, manifest: Manifest) -> bool:
    return (
        other.model.architecture == manifest.model.architecture
        and other.model.weight_bytes == manifest.model.weight_bytes
        and other.content_keys.get("hardware") == manifest.content_keys.get("hardware")
    )


def _responses(run: RunDirectory, other: Manifest) -> ResponseLengths | None:
    """As recorded, or on average while a run is not done sampling; None before it has a response."""
    limit = other.settings.sampling.max_new_tokens
    if run.rollouts_path.exists():
        tokens = _list_lengths(run.rollouts_path, "token_ids")
        return ResponseLengths(float(tokens.mean()), int(tokens.max()), str(run.path))
    records = [other.stages.get(stage.name) for stage in make_plan(other.settings).sample_stages]
    counts = [record.tokens for record in records if record is not None and record.state == "done"]
    each = (other.settings.prompts.num_prompts or 0) * other.settings.sampling.samples_per_prompt
    return ResponseLengths(sum(counts) / (len(counts) * each), limit, str(run.path)) if counts and each else None


def _read(run: RunDirectory, other: Manifest, architecture: Architecture, responses: ResponseLengths) -> EarlierRun:
    """The run as if every side's checkpoint were of the run's own architecture."""
    prompts = _list_lengths(run.prompts_path, "prompt_token_ids").tolist()
    paths = (other.settings.model.path, *other.checkpoints)
    architectures = dict.fromkeys(paths, architecture)
    layered = frozenset(name for name, stage in other.stages.items() if stage.effective_settings.get("by_layer"))
    workload = replace(workload_of(other, architectures, prompts, responses), by_layer=layered)
    stages = []
    for stage in make_plan(other.settings).stages:
        record = other.stages.get(stage.name)
        if record is not None and record.state == "done" and _is_a_time(record.seconds):
            work = work_of(stage, workload)
            start = record.start_seconds if _is_a_time(record.start_seconds) else None
            stages.append(Measurement(what_of(stage), work, record.seconds, start))
    return EarlierRun(
        path=run.path,
        prompts_source=other.settings.prompts.source,
        limit_tokens=other.settings.sampling.max_new_tokens,
        responses=responses,
        stages=tuple(stages),
    )


_HOST: Final = "cpu"


def stages_by_layer(stages: Sequence[Stage], workload: Workload, calibration: Calibration) -> dict[str, str]:
    """The stages of the reference that will hold one layer at a time, and why."""
    reference = workload.settings.reference
    layered = {}
    for stage in stages:
        side = stage.side
        if side.role != "ref" or side.num_ranks or side.training is None:
            continue
        if side.rounded_to is not None and side.rounded_to == workload.checkpoint_dtype:
            continue
        needs_whole_model = side.training.adapter is not None or side.training.device_map is not None
        if needs_whole_model and not reference.by_layer:
            continue
        device = calibration.rates_of("training", side.dtype).device
        num_bytes = workload.architecture_of(side).parameters * side.dtype.num_bytes
        free = calibration.free_memory_bytes[device]
        if reference.holds_one_layer(num_bytes, free):
            sizes = (
                f"its weights in {side.dtype} take {write_size(num_bytes)}, and {write_size(free)} are free ({device})"
            )
            layered[stage.name] = "reference.by_layer asks for it" if reference.by_layer else sizes
    return layered


def with_stages_by_layer(workload: Workload, stages: Sequence[Stage], calibration: Calibration) -> Workload:
    """The workload that says which stages these are, and whether their hidden states are too many for memory."""
    workload = replace(workload, by_layer=frozenset(stages_by_layer(stages, workload, calibration)))
    on_disk = most_hidden_bytes(workload, stages) > HIDDEN_SHARE * calibration.free_memory_bytes[_HOST]
    return replace(workload, hidden_on_disk=on_disk)


def most_hidden_bytes(workload: Workload, stages: Sequence[Stage]) -> float:
    """Of the hidden states of one of these stages; they are written to disk, whether they are in memory too or not."""
    layered = [stage for stage in stages if isinstance(stage, ScoreStage) and stage.name in workload.by_layer]
    return max((hidden_bytes(stage, workload) for stage in layered), default=0.0)
