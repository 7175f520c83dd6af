"""A training run as its files tell it, read without torch.

What guards do and where they act, in words; what a run's files say of guards may be anybody's.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.dtypes import sides_label
from mismatch_probe.guards.rules.base import metric_words
from mismatch_probe.notation import join_names, write_count, write_number
from mismatch_probe.reading import flat
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord, TrainingDirectory, TrainingManifest
from mismatch_probe.report.figures.limits import Limit
from mismatch_probe.report.names import OTHER_COLORS, PairStyle, dtypes_style
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

    @property
    def num_guards_on(self) -> int:
        """0 where no record says which guards judged the run."""
        return len(self.manifest.guards) - len(self.manifest.guards_off)

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
    by_dtypes = _varying_settings(manifests) == [_DTYPES]
    labels = _run_labels(directories, manifests)
    return [
        _read(directory, manifest, label, number, _run_style(manifest, number, len(directories), by_dtypes=by_dtypes))
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


def _run_style(manifest: TrainingManifest, number: int, num_runs: int, *, by_dtypes: bool) -> PairStyle:
    """A single run needs no dash and no marker to be recognised."""
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


_DONE: Final = {
    "log": "write it down",
    "warn": "warn",
    "tighten_sequences": "drop the sequences with the largest weights",
    "leave_out": "leave out responses without a reward",
    "skip_update": "skip the update",
    "lower_learning_rate": "lower the learning rate",
    "switch_correction": "switch the correction",
    "resync": "send the weights again",
    "raise_precision": "raise the precision",
    "rollback": "go back to the last good checkpoint",
    "stop": "stop",
}
_BY: Final = {
    "lower_learning_rate(level)": "lower the learning rate to its level before",
    "lower_learning_rate": "multiply the learning rate by {}",
    "tighten_sequences": "drop the sequences with the largest weights, the bound times {}",
}
"""What an action with an argument does, or with this argument."""


def action_words(action: str) -> str:
    """`skip the update`; an action that this version does not know as it was written."""
    name, argument = _action_and_argument(action)
    words = _DONE.get(name)
    if words is None or not argument:
        return words or action
    return _BY.get(action, _BY.get(name, f"{words} ({{}})")).format(argument)


def actions_words(actions: Sequence[str]) -> str:
    return ", ".join(map(action_words, actions))


def firing_words(firing: Firing) -> list[str]:
    """What it saw and what it asked for, line by line."""
    return [firing.sentence, f"asked to {actions_words(firing.actions)}"]


def off_words(off: Mapping[str, Sequence[str]]) -> str:
    """Guards that are off, each with the metrics that no step gave it."""
    reasons = {guard: join_names([metric_words(name) for name in lacking]) for guard, lacking in off.items()}
    listing = ", ".join(f"{guard} (lacks {what})" for guard, what in reasons.items())
    return f"Guards that are off in this run: {listing}."


def times(number: int) -> str:
    return "once" if number == 1 else f"{write_count(number)} times"


def limits_on(metric: str, course: Course) -> Iterator[Limit]:
    """Where guards of the rule `limit` act on a metric."""
    for guard in course.manifest.guards:
        if guard.get("rule") != "limit" or guard.get("metric") != metric:
            continue
        name, actions = str(guard.get("name")), asked_words(guard.get("actions"))
        for side, is_upper in (("above", True), ("below", False)):
            value = guard.get(side)
            if isinstance(value, float | int) and math.isfinite(value):
                error_words = f" by {guard.get('errors')} standard errors" if guard.get("error") else ""
                words = f"guard {name}: {side} {write_number(float(value))}{error_words} it asks to {actions}"
                yield Limit(float(value), is_upper, words)


def asked_words(firings: Any) -> str:
    """`warn`, or `skip the update, then stop` where later firings ask for more."""
    if not isinstance(firings, list):
        return "act"
    steps = [actions_words([str(action) for action in firing]) for firing in firings if isinstance(firing, list)]
    return ", then ".join(dict.fromkeys(steps)) or "act"


def _action_and_argument(action: str) -> tuple[str, str]:
    match = re.fullmatch(r"(\w+)\(([^()]*)\)", action)
    return (match[1], match[2]) if match else (action, "")


_DTYPES: Final = "dtypes"
_LORA: Final = "policy.lora"
_CALLED: Final = {"objective.name": "objective", "task.source": "task", _LORA: "LoRA"}
_MOST_DIFFERENCES: Final = 2
_OF_NO_EFFECT: Final = (
    *("model", "steps", "report_to", "guards", "checkpoint.every", "checkpoint.keep"),
    *("policy.device", "policy.micro_batch_tokens", "policy.gradient_checkpointing"),
)


def _run_labels(directories: Sequence[TrainingDirectory], manifests: Sequence[TrainingManifest]) -> list[str]:
    """`BF16`, `PPO, seed 1`: a name for each run, no two alike."""
    differing = _varying_settings(manifests)
    if 0 < len(differing) <= _MOST_DIFFERENCES:
        labels = [", ".join(_setting_value(name, manifest) for name in differing) for manifest in manifests]
        if len(set(labels)) == len(labels):
            return labels
    if len(manifests) == 1:
        return [sides_label(manifests[0].settings.train_dtype, manifests[0].settings.infer_dtype)]
    return _folders(directories)


def _varying_settings(manifests: Sequence[TrainingManifest]) -> list[str]:
    """Settings that are not the same in all runs and may change what is learnt; both dtypes are one of them."""
    sides = [dict(_named_settings(manifest)) for manifest in manifests]
    names = dict.fromkeys(name for side in sides for name in side)
    return [name for name in names if any(side.get(name) != sides[0].get(name) for side in sides)]


def _named_settings(manifest: TrainingManifest) -> Iterator[tuple[str, Any]]:
    settings = manifest.settings.model_dump(mode="json")
    yield "model", manifest.model.fingerprint
    yield _DTYPES, (settings.pop("train_dtype"), settings.pop("infer_dtype"))
    yield _LORA, settings["policy"].pop("lora")
    for name, value in flat(settings):
        if not name.startswith(_OF_NO_EFFECT):
            yield name, value


def _setting_value(name: str, manifest: TrainingManifest) -> str:
    settings = manifest.settings
    match name:
        case "model":
            return PurePath(manifest.model.name).name
        case "dtypes":
            return sides_label(settings.train_dtype, settings.infer_dtype)
        case "objective.name":
            return settings.objective.name
        case "task.source":
            return settings.task.source
        case "policy.lora":
            return "no LoRA" if settings.policy.lora is None else f"LoRA of rank {settings.policy.lora.rank}"
    value = dict(_named_settings(manifest)).get(name)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{setting_words(name)} {text}"


def setting_words(name: str) -> str:
    """`learning rate` for `optimizer.learning_rate`."""
    return _CALLED.get(name, name.rpartition(".")[2].replace("_", " "))


def _folders(directories: Sequence[TrainingDirectory]) -> list[str]:
    """Their names, or their whole paths where two share a name."""
    names = [directory.path.absolute().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory.path) for directory in directories]
