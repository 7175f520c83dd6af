"""What runs beside this one tell: how long stages really took, and how that scales the roofline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.compare.cost.roofline import Architecture, Calibration, ProcessName, Rates, Span, Work
from mismatch_probe.compare.cost.stage_work import (
    ResponseLengths,
    StageKey,
    Workload,
    key_of,
    kinds_of,
    work_of,
    workload_of,
)
from mismatch_probe.compare.plan import make_plan, plan_of
from mismatch_probe.compare.preflight import count, measure
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import DecodeAloneStage, SampleStage, Stage
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, MismatchProbeError
from mismatch_probe.records.files import COMPARISONS, kind_of
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table

FROM_RATES: Final = 4.0
"""Between a quarter and four times: the roofline alone. What was seen of each factor: `reports/cost-model.md`."""
FROM_THE_SAME: Final = 3.0
"""The same kind of stage was measured of the same side, of the same model on the same hardware."""
FROM_ANOTHER_SIDE: Final = 4.0
"""It was measured in another dtype, or with other settings."""
FROM_ANOTHER_KIND: Final = 6.0
"""Another stage was measured that decodes, or scores, as this one does."""
_DECODING: Final = (SampleStage, DecodeAloneStage)
MAX_NEW_TOKENS: Final = "max_new_tokens"
_MOST_RUNS: Final = 4
_MOST_FOLDERS: Final = 50
_MOST_SECONDS: Final = 1e9


@dataclass(frozen=True)
class Measurement:
    """A stage that was run."""

    key: StageKey
    work: Work
    seconds: float
    """Of its batches."""
    start_seconds: float | None
    """Before its first batch; None where that is not recorded."""


@dataclass(frozen=True)
class EarlierRun:
    """What a run tells of later ones."""

    path: Path
    prompts_source: str
    """Where its prompts came from."""
    limit_tokens: int
    """Of a response, at most."""
    responses: ResponseLengths
    stages: tuple[Measurement, ...]


def earlier_runs(folder: Path, manifest: Manifest, architecture: Architecture) -> list[EarlierRun]:
    """The newest comparisons in a folder of runs that say something of this one: a model of the same architecture and
    size, on the same hardware. What cannot be read says nothing.
    """
    runs = []
    newest_first = sorted(folder.glob("*/manifest.json"), key=_modification_time, reverse=True)
    for path in (manifest_path.parent for manifest_path in newest_first[:_MOST_FOLDERS]):
        run = RunDirectory(path)
        try:
            if kind_of(path) not in COMPARISONS:
                continue
            other = run.read_manifest()
            if _is_alike(other, manifest) and (responses := _responses(run, other)) is not None:
                runs.append(_read(run, other, architecture, responses))
        except MismatchProbeError:
            continue
        if len(runs) == _MOST_RUNS:
            break
    return runs


def _modification_time(path: Path) -> float:
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
    names_by_layer = frozenset(name for name, stage in other.stages.items() if stage.effective_settings.get("by_layer"))
    workload = replace(workload_of(other, architectures, prompts, responses), by_layer=names_by_layer)
    stages = []
    for stage in plan_of(other).stages:
        record = other.stages.get(stage.name)
        if record is not None and record.state == "done" and _is_a_time(record.seconds):
            work = work_of(stage, workload)
            start = record.start_seconds if _is_a_time(record.start_seconds) else None
            stages.append(Measurement(key_of(stage), work, record.seconds, start))
    return EarlierRun(
        path=run.path,
        prompts_source=other.settings.prompts.source,
        limit_tokens=other.settings.sampling.max_new_tokens,
        responses=responses,
        stages=tuple(stages),
    )


@dataclass(frozen=True)
class Pace:
    """What is known of a machine; either may be missing."""

    calibration: Calibration | None
    """Its measured rates."""
    measurements: Sequence[Measurement]
    """Stages that ran on it."""

    def span(self, key: StageKey, work: Work) -> Span | None:
        """How long a stage takes without its start: the roofline's seconds, scaled by the stage most like it that was
        measured; None where nothing measured tells.
        """
        size = self.rates_of(key.process, key.dtype).seconds(work)
        measurements = [
            (stage, self.rates_of(stage.key.process, stage.key.dtype).seconds(stage.work))
            for stage in self.measurements
            if self._tells_of(stage.key, key)
        ]
        for factor in (FROM_THE_SAME, FROM_ANOTHER_SIDE, FROM_ANOTHER_KIND):
            alike = [
                (stage, its_size) for stage, its_size in measurements if its_size and _factor(stage.key, key) <= factor
            ]
            if alike and (factor < FROM_ANOTHER_KIND or self.calibration is None):
                nearest, its_size = min(alike, key=lambda pair: abs(log(pair[1] / size)) if size else 0)
                constant = nearest.seconds + (size - its_size if self.calibration else 0)
                return _between(nearest.seconds * size / its_size, constant, factor)
        return None if self.calibration is None else Span.around(size, FROM_RATES)

    def has_seen(self, key: StageKey) -> bool:
        """Whether a stage of the same kind, side and settings was measured."""
        return any(stage.key == key for stage in self.measurements)

    def start_span(self, key: StageKey) -> Span | None:
        """How long it takes from the end of the stage before to this one's first batch; None where nothing tells."""
        starts = [
            (stage.key.dtype, stage.start_seconds)
            for stage in self.measurements
            if (stage.key.kind, stage.key.manner) == (key.kind, key.manner) and stage.start_seconds is not None
        ]
        seconds = [each for dtype, each in starts if dtype == key.dtype] or [each for _, each in starts]
        return Span.around(sum(seconds) / len(seconds), FROM_THE_SAME) if seconds else None

    def _tells_of(self, other: StageKey, key: StageKey) -> bool:
        """Of a server only a server does; beside measured rates, only what ran at one of them."""
        if (other.process == "server") != (key.process == "server"):
            return False
        return self.calibration is None or self.calibration.has(other.process, other.dtype)

    def rates_of(self, process: ProcessName, dtype: Dtype) -> Rates:
        """Those measured; without, only how stages compare, for a measured stage to scale."""
        if self.calibration is not None:
            return self.calibration.rates_of(process, dtype)
        return Rates(
            process=process,
            dtype=dtype,
            device="",
            matrix_flops_per_second=1e11,
            attention_flops_per_second=1e11,
            memory_bytes_per_second=1e10,
            operation_seconds=2e-6,
            disk_bytes_per_second=1e9,
        )


def _factor(other: StageKey, key: StageKey) -> float:
    """How far a stage like `key` may be from what one like `other` took; infinite where that tells nothing."""
    if other.kind != key.kind:
        return FROM_ANOTHER_KIND if (other.kind in _DECODING) == (key.kind in _DECODING) else inf
    return FROM_THE_SAME if other == key else FROM_ANOTHER_SIDE


def _between(variable: float, constant: float, factor: float) -> Span:
    """What a measured stage of another size took beyond the roofline grows with the size, or was spent once: both are
    in the interval. Without rates all of it may be either.
    """
    low, high = sorted((variable, constant)) if constant > 0 else (variable, variable)
    return Span(low_seconds=low / factor, likely_seconds=sqrt(low * high), high_seconds=high * factor)


def expected_workload(
    preparation: Preparation, architectures: Mapping[str, Architecture], runs: Sequence[EarlierRun]
) -> Workload:
    """With responses as long as those of the newest earlier run on such prompts, or at their limit."""
    manifest, limit = preparation.manifest, preparation.manifest.settings.sampling.max_new_tokens
    source = manifest.settings.prompts.source
    earlier_lengths = (run.responses for run in runs if run.prompts_source == source and run.limit_tokens >= limit)
    at_the_limit = ResponseLengths(float(limit), limit, MAX_NEW_TOKENS)
    lengths = [len(prompt.token_ids) for prompt in preparation.prompts]
    return workload_of(manifest, architectures, lengths, next(earlier_lengths, at_the_limit))


def architectures_of(preparation: Preparation) -> Mapping[str, Architecture]:
    """Of every checkpoint of a run, by the path that its sides name; counted in a job where preparing did not."""
    manifest = preparation.manifest
    folders = {manifest.settings.model.path: manifest.model.folder}
    folders |= {path: identity.folder for path, identity in manifest.checkpoints.items()}
    architectures = preparation.architectures or count(
        folders, trust_remote_code=manifest.settings.model.trust_remote_code
    )
    return architectures.all()


def measure_for(
    preparation: Preparation,
    architecture: Architecture,
    stages: Sequence[Stage],
    further: Sequence[tuple[ProcessName, Dtype]] = (),
) -> Calibration:
    """Rates of what the stages run in, and of further processes and dtypes."""
    manifest, kinds = preparation.manifest, list(dict.fromkeys([*kinds_of(stages), *further]))
    return measure(architecture, kinds, manifest.settings.training.device, manifest.model.folder)
