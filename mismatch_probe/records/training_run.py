"""The files of a training run and of a sanity test: manifest, metrics and events, checkpoints."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from mismatch_probe.config.model import SanitySettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.digests import read_manifest, write_manifest
from mismatch_probe.records.files import TRAININGS, open_to_append, require_kind, storage_errors, write_text
from mismatch_probe.records.lines import NONFINITE, EventLine, MetricsLine, read_run_lines
from mismatch_probe.records.log_readings import Entry
from mismatch_probe.records.manifest import ModelIdentity, read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Record
from mismatch_probe.stats.results import Estimate

Outcome = Literal["finished", "stopped", "unfinished"]


class TrainingManifest(Entry):
    """What was started, on what; `effective` is what both sides report of themselves, `guards` those in use.

    run_key and digest: as a comparison's.
    """

    training_version: int = 1
    tool_version: str
    created_at: str
    command: list[str]
    settings: TrainSettings
    model: ModelIdentity
    content_keys: dict[str, str]
    guards: list[dict[str, Any]] = []
    versions: dict[str, str]
    hardware: dict[str, Any]
    git: dict[str, Any] | None
    run_key: str = ""
    digest: str = ""
    effective: dict[str, Any] = {}
    guards_off: dict[str, list[str]] = {}
    outcome: str = "unfinished"


class TrainingDirectory(RunDirectory):
    """Paths and documents of one training run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics_path = path / "metrics.jsonl"
        self.events_path = path / "events.jsonl"
        self.checkpoints_path = path / "checkpoints"

    def discard_without_results(self) -> None:
        """Remove a run that ended before its first checkpoint, so that the same command can be given again, fixed."""
        if not any((self.path / name).exists() for name in ("checkpoints", "metrics.jsonl")):
            self.remove()

    def write_training_manifest(self, manifest: TrainingManifest) -> None:
        write_manifest(self.manifest_path, manifest, manifest.run_key)

    def read_training_manifest(self) -> TrainingManifest:
        require_kind(self.path, *TRAININGS)
        return read_manifest(
            self.manifest_path, TrainingManifest, missing="it is not a training run", fix="train again"
        )

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Add one line of JSON, written whole before anything else happens."""
        with storage_errors(path), open_to_append(path) as lines:
            lines.write(f"{json.dumps(record, allow_nan=False)}\n".encode())

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics; those that are not finite are null and named under `nonfinite`."""
        bad = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        self.append(self.metrics_path, {"step": step, **metrics, **dict.fromkeys(bad), NONFINITE: bad})

    def read_metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Each step's metrics in the order they were written; raises as `read_lines`."""
        for line, _ in read_run_lines(self.metrics_path, MetricsLine):
            yield line.step, line.metrics

    def read_events(self) -> list[dict[str, Any]]:
        """What guards did, in order; raises as `read_lines`."""
        return [line.model_dump() for line, _ in read_run_lines(self.events_path, EventLine)]

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps, which will be done again."""
        kinds: dict[Path, type[MetricsLine | EventLine]] = {self.metrics_path: MetricsLine, self.events_path: EventLine}
        for path, kind in kinds.items():
            if path.exists():
                write_text(path, "".join(text for line, text in read_run_lines(path, kind) if line.step <= step))


class Canary(Entry):
    """Both sides are compared on weights that were just sent; `train --canary --json` prints it."""

    canary_version: int = 1
    tool_version: str
    model: str
    step: int
    """Of the checkpoint whose weights they are, 0 for the model itself."""
    train_dtype: Dtype
    infer_dtype: Dtype
    metrics: dict[str, float | None]
    """Those of a step, None where a value is not finite."""
    fired: list[dict[str, Any]]
    """Guards, as in events.jsonl."""


class MetricCourse(Entry):
    """One metric over a run. `first` and `last` are means over the summary's `window` of steps; a step whose value is
    not finite is counted and in none of them; None where nothing is left.
    """

    first: float | None
    last: float | None
    lowest: float | None
    lowest_step: int | None
    highest: float | None
    highest_step: int | None
    nonfinite_steps: int


class GuardFirings(Entry):
    """How often one guard fired, and what it said and asked for the first time."""

    guard: str
    metric: str
    firings: int
    first_step: int
    last_step: int
    actions: list[str]
    sentence: str


class TrainingSummary(Entry):
    """What came of a training run, from its files; `train --json` and `report --json` print it.

    seconds, num_tokens: of all recorded steps; the tokens are those of responses.
    """

    training_version: int = 1
    tool_version: str
    model: str
    task: str
    objective: str
    train_dtype: Dtype
    infer_dtype: Dtype
    seed: int
    outcome: Outcome
    diagnosis: str | None
    steps: int
    steps_asked: int
    window: int
    best_reward: float | None
    """The highest mean reward of `window` steps in a row, the last of them at best_reward_step."""
    best_reward_step: int | None
    skipped_updates: int
    """Steps whose gradients were not finite."""
    seconds: float
    num_tokens: int
    num_events: int
    guards: list[GuardFirings]
    guards_off: dict[str, list[str]]
    """Guards that judged no step, and the metrics that no step gave them."""
    metrics: dict[str, MetricCourse]
    report: str


SOLVED_FROM: Final = 1.0
"""The least reward of a right response."""
PASS_ACCURACY: Final = 0.95
"""More than this share of the latest responses must be right."""


class Solved(Record):
    """The responses to a problem in the latest step that sampled it: how many, how many right, and their tokens."""

    step: int
    responses: int
    solved: int
    tokens: int


TOO_FEW_STEPS: Final = "not enough"
"""The end of the verdict where only steps ran out."""


class SanityRecord(Record):
    """The whole test."""

    sanity_version: int = 1
    settings: SanitySettings
    rates: dict[str, float] = {}
    """Share of the starting checkpoint's responses solved, of every problem tried."""
    kept: list[str] | None = None
    """The problems trained on, None until they are chosen."""
    latest: dict[str, Solved] = {}
    """Of each kept problem sampled so far."""
    step: int = 0
    accuracy: Estimate | None = None
    """Share solved of `latest` once that holds every kept problem; its interval is clustered by problem."""
    passed: bool | None = None
    """None while training may still pass."""
    verdict: str = "unfinished"
    """What came of it, as a sentence."""


class SanityDirectory(TrainingDirectory):
    """A training run's directory with the test's record."""

    @property
    def sanity_path(self) -> Path:
        return self.path / "sanity.json"

    def discard_without_results(self) -> None:
        """Of a test, what tried problems earned is a result too."""
        if not self.read_sanity().rates:
            super().discard_without_results()

    def write_sanity(self, record: SanityRecord) -> None:
        write_document(self.sanity_path, record)

    def read_sanity(self) -> SanityRecord:
        return read_document(
            self.sanity_path,
            SanityRecord,
            missing="no sanity test was started here; give another --out",
            fix="run the test again",
        )
