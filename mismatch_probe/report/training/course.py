"""A training run as its files tell it, read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord, TrainingDirectory, TrainingManifest
from mismatch_probe.report.names import OTHER_COLORS, PairStyle, dtypes_style
from mismatch_probe.report.training.labels import DTYPES, run_labels, what_varies
from mismatch_probe.stats.sequences import Floats

_MILD = frozenset({"log", "warn"})
_STOP = "stop"
_DASHES_AND_MARKERS = (((), "o"), ((6, 2), "s"), ((1.5, 1.5), "^"), ((6, 2, 1.5, 2), "D"))
_OTHER_STYLES = [
    PairStyle(color, *_DASHES_AND_MARKERS[number % len(_DASHES_AND_MARKERS)])
    for number, color in enumerate(OTHER_COLORS)
]
"""In no dtype's colour."""


@dataclass(frozen=True)
class Firing:
    """One line of `events.jsonl`: a guard that fired, and what it asked for; its metric is in words, as versions before
    did not write it.
    """

    step: int
    guard: str
    metric: str
    value: float
    actions: Sequence[str]
    sentence: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        metric = record["metric"]
        return cls(
            step=record["step"],
            guard=record["guard"],
            metric=metric,
            value=float(record["value"]),
            actions=record["actions"],
            sentence=record["sentence"].replace(metric, metric_words(metric)),
        )

    @property
    def changed_the_run(self) -> bool:
        """Whether it asked for more than to be written down."""
        return any(action not in _MILD for action in self.actions)

    @property
    def stopped_the_run(self) -> bool:
        return _STOP in self.actions


@dataclass(frozen=True)
class Course:
    """One run; every metric [steps] has a value for each recorded step, NaN where the step lacks it.

    `label` and `style` tell it from the other runs of a page; `key` is part of an anchor. `sanity` is there where the
    run is a sanity test.
    """

    label: str
    key: str
    style: PairStyle
    manifest: TrainingManifest
    steps: Floats
    metrics: dict[str, Floats]
    firings: Sequence[Firing] = field(default_factory=tuple)
    sanity: SanityRecord | None = None

    def metric(self, name: str) -> Floats:
        """Values [steps]; all NaN where no step has it."""
        return self.metrics.get(name, np.full(self.steps.shape, np.nan))

    def has(self, name: str) -> bool:
        """Whether any step has a value, were it infinite."""
        return bool((~np.isnan(self.metric(name))).any())


def read_courses(directories: Sequence[TrainingDirectory]) -> list[Course]:
    """Runs in the order given, named by what differs between them.

    Raises:
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read by this version.
    """
    manifests = [directory.read_training_manifest() for directory in directories]
    by_dtypes = what_varies(manifests) == [DTYPES]
    labels = run_labels(directories, manifests)
    return [
        _read(directory, manifest, label, number, _style(manifest, number, len(directories), by_dtypes=by_dtypes))
        for number, (directory, manifest, label) in enumerate(zip(directories, manifests, labels, strict=True))
    ]


def _read(
    directory: TrainingDirectory, manifest: TrainingManifest, label: str, number: int, style: PairStyle
) -> Course:
    steps, metrics = _columns(list(directory.read_metrics()))
    sanity = SanityDirectory(directory.path)
    return Course(
        label=label,
        key=f"run-{number + 1}",
        style=style,
        manifest=manifest,
        steps=steps,
        metrics=metrics,
        firings=[Firing.of(record) for record in directory.read_events()],
        sanity=sanity.read_sanity() if sanity.sanity_path.exists() else None,
    )


def _style(manifest: TrainingManifest, number: int, num_runs: int, *, by_dtypes: bool) -> PairStyle:
    """A run alone needs no dash and no marker to be told."""
    settings = manifest.settings
    if num_runs == 1:
        return PairStyle(settings.infer_dtype, (), "")
    if by_dtypes:
        return dtypes_style(settings.train_dtype, settings.infer_dtype)
    return _OTHER_STYLES[number % len(_OTHER_STYLES)]


def _columns(rows: Sequence[tuple[int, dict[str, float]]]) -> tuple[Floats, dict[str, Floats]]:
    names = dict.fromkeys(name for _, values in rows for name in values)
    columns = {name: np.array([values.get(name, np.nan) for _, values in rows], dtype=float) for name in names}
    return np.array([step for step, _ in rows], dtype=float), columns
