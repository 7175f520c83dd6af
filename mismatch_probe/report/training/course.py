"""A training run as its files tell it, read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest
from mismatch_probe.report.names import PairStyle, dtypes_style
from mismatch_probe.report.training.comparable import what_differs
from mismatch_probe.stats.sequences import Floats

_MILD = frozenset({"log", "warn"})
_SHARED_STYLES = (
    PairStyle("fp16", (), "o"),
    PairStyle("bf16", (6, 2), "s"),
    PairStyle("fp32", (1.5, 1.5), "^"),
    PairStyle("fp64", (6, 2, 1.5, 2), "D"),
    PairStyle("truncate", (), "s"),
    PairStyle("mask", (6, 2), "^"),
)


@dataclass(frozen=True)
class Firing:
    """One line of `events.jsonl`: a guard that fired, and what it asked for."""

    step: int
    guard: str
    metric: str
    value: float
    actions: Sequence[str]
    sentence: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        return cls(
            step=record["step"],
            guard=record["guard"],
            metric=record["metric"],
            value=float(record["value"]),
            actions=record["actions"],
            sentence=record["sentence"],
        )

    @property
    def changed_the_run(self) -> bool:
        """Whether it asked for more than to be written down."""
        return any(action not in _MILD for action in self.actions)


@dataclass(frozen=True)
class Course:
    """One run; every metric [steps] has a value for each recorded step, NaN where the step lacks it.

    `label` and `style` tell it from the other runs of a page; `key` is part of an anchor.
    """

    label: str
    key: str
    style: PairStyle
    manifest: TrainingManifest
    steps: Floats
    metrics: dict[str, Floats]
    firings: Sequence[Firing] = field(default_factory=tuple)

    def metric(self, name: str) -> Floats:
        """Values [steps]; all NaN where no step has it."""
        return self.metrics.get(name, np.full(self.steps.shape, np.nan))

    def has(self, name: str) -> bool:
        """Whether any step has a value, were it infinite."""
        return bool((~np.isnan(self.metric(name))).any())


def read_courses(directories: Sequence[TrainingDirectory]) -> list[Course]:
    """Runs in the order given, told apart by dtypes where these alone differ, else by folder.

    Raises:
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read by this version.
    """
    manifests = [directory.read_training_manifest() for directory in directories]
    dtypes = [(manifest.settings.train_dtype, manifest.settings.infer_dtype) for manifest in manifests]
    same = not any(what_differs(manifests[0], other) for other in manifests[1:])
    by_dtypes = same and len(set(dtypes)) == len(dtypes)
    folders = _folders(directories)
    courses = []
    for number, (directory, manifest, pair) in enumerate(zip(directories, manifests, dtypes, strict=True)):
        steps, metrics = _columns(list(directory.read_metrics()))
        courses.append(
            Course(
                label=sides_label(*pair) if by_dtypes else folders[number],
                key=f"run-{number + 1}",
                style=_style(number, pair, alone=len(directories) == 1, by_dtypes=by_dtypes),
                manifest=manifest,
                steps=steps,
                metrics=metrics,
                firings=[Firing.of(record) for record in directory.read_events()],
            )
        )
    return courses


def _style(number: int, pair: tuple[Dtype, Dtype], *, alone: bool, by_dtypes: bool) -> PairStyle:
    """A run alone needs no dash and no marker to be told."""
    if alone:
        return PairStyle(pair[1], (), "")
    return dtypes_style(*pair) if by_dtypes else _SHARED_STYLES[number % len(_SHARED_STYLES)]


def _columns(rows: Sequence[tuple[int, dict[str, float]]]) -> tuple[Floats, dict[str, Floats]]:
    names = dict.fromkeys(name for _, values in rows for name in values)
    columns = {name: np.array([values.get(name, np.nan) for _, values in rows], dtype=float) for name in names}
    return np.array([step for step, _ in rows], dtype=float), columns


def _folders(directories: Sequence[TrainingDirectory]) -> list[str]:
    """Their names, or their whole paths where two share a name."""
    names = [directory.path.absolute().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory.path) for directory in directories]
