"""The gate file, parsed strictly: every mistake in it becomes one sentence that names the place."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator, Field, FiniteFloat, PlainSerializer, model_validator

from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.config.model import Count, Settings
from mismatch_probe.config.sides import SideName
from mismatch_probe.difference.versus import EVERYTHING, NumberRange
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.gate.claims import (
    AGGREGATES,
    FILED_METRICS,
    HEADROOM,
    LAYOUT_METRICS,
    LEAST_STEP,
    LOG,
    declared_looks,
    full_name,
    has_regression,
    is_better_higher,
    known_metrics,
    range_of,
    why_never_blocking,
)
from mismatch_probe.reading import is_there
from mismatch_probe.records.answers import CheckKind
from mismatch_probe.stats.catalogue import metric_words

KINDS: tuple[CheckKind, ...] = ("max", "min", "max_regression", "equal")
SIGNS: dict[CheckKind, str] = {"max": "<=", "min": ">=", "max_regression": "worse by <=", "equal": "=="}

PresetName = Literal["nemo-rl", "prime-rl", "verl", "tinker", "bitwise", "layout"]
GateSource = Path | PresetName
"""A gate file, or a preset alone."""


def _parse_span(value: object) -> object:
    """`0:256`, `512:`, `:256` -> a range of whole numbers that excludes its end."""
    match = re.fullmatch(r"\s*(\d{0,9})\s*:\s*(\d{0,9})\s*", value, flags=re.ASCII) if isinstance(value, str) else None
    if match is None or not (match[1] or match[2]):
        raise ValueError(f'{value!r} is no range; write "0:256", or "512:" for everything from 512 on')
    low, high = int(match[1] or 0), int(match[2]) if match[2] else None
    if high is not None and high <= low:
        raise ValueError(f"{value!r} is empty: its end is not above its start")
    return low, high


def _parse_pair(value: object) -> object:
    """`bf16/fp8kv` (training side, inference side), or `bf16` for both."""
    if not isinstance(value, str) or value.count("/") > 1:
        raise ValueError(f'{value!r} is no pair of sides; write "bf16" or "TRAIN/INFER"')
    names = value.split("/")
    return names[0], names[-1]


def _span_text(span: NumberRange) -> str:
    return f"{span[0]}:{'' if span[1] is None else span[1]}"


SpanField = Annotated[NumberRange, BeforeValidator(_parse_span), PlainSerializer(_span_text)]
SlicePair = Annotated[tuple[SideName, SideName], BeforeValidator(_parse_pair), PlainSerializer("/".join)]


class Slice(Settings):
    """The part of the data a check looks at: one pair of sides (all, unless named), positions, response lengths, and of
    an imported log steps of training.
    """

    pair: SlicePair | None = None
    position: SpanField = EVERYTHING
    length: SpanField = EVERYTHING
    step: SpanField = EVERYTHING

    def __str__(self) -> str:
        spans = {"position": self.position, "length": self.length, "step": self.step}
        return ", ".join(f"{name} {_span_text(span)}" for name, span in spans.items() if span != EVERYTHING)


class MetricLimit(Settings):
    """One number that bounds a metric."""

    metric: str
    max: FiniteFloat | None = None
    min: FiniteFloat | None = None
    equal: FiniteFloat | None = None
    level: Literal["off", "warn", "error"] = "error"
    source: str = ""

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        kinds = [kind for kind in KINDS if kind in type(self).model_fields]
        limits = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(limits) != 1:
            what = f"both {' and '.join(limits)}" if limits else "no limit"
            raise ValueError(f"{what} given; give one of {', '.join(kinds)}")
        return self

    @property
    def kind(self) -> CheckKind:
        return next(kind for kind in KINDS if getattr(self, kind, None) is not None)

    @property
    def limit(self) -> float:
        return float(getattr(self, self.kind))

    @property
    def upper(self) -> bool:
        """Whether the limit is an upper bound: of the metric, or of how much worse it became."""
        return self.kind != "min"

    @property
    def subject(self) -> str:
        """The name of what is measured."""
        return self.metric

    @property
    def bound(self) -> str:
        """The limit as text: `<= 0.1`."""
        return f"{SIGNS[self.kind]} {self.limit:g}"

    def is_kept_by(self, value: float) -> bool:
        """Whether a value that is certain keeps the limit."""
        if self.kind == "equal":
            return value == self.limit
        return value <= self.limit if self.upper else value >= self.limit

    def __str__(self) -> str:
        return f"{self.subject} {self.bound}"


class Check(MetricLimit):
    """A limit on what `compare` measured. `max_regression` is relative: 0.1 lets the metric be a tenth worse than the
    baseline's.
    """

    agg: Literal["mean", "p50", "p90", "p99", "p99_9", "max", "min", "std"] = "mean"
    slice: Slice = Slice()
    clip: float | None = Field(default=None, gt=0, le=20)
    max_regression: float | None = Field(default=None, gt=0, le=100)

    @model_validator(mode="after")
    def _can_be_decided(self) -> Self:
        reason = why_never_blocking(self.name, self.clip)
        if self.level == "error" and reason:
            raise ValueError(f'{self.name} never blocks: {reason}, or set level = "warn" to have it shown')
        self._check_can_be_kept_and_broken()
        if self.kind == "max_regression" and not has_regression(self.name):
            raise ValueError(f"{self.name} has no relative regression: it may be 0 or change sign; use max or min")
        return self

    def _check_can_be_kept_and_broken(self) -> None:
        least, most = range_of(self.name, self.clip)
        clip = "" if self.clip is None else f" with clip = {self.clip:g}"
        if self.min is not None and self.min <= least:
            raise ValueError(f"{self.name} is never below {least:g}{clip}, so the limit asks for nothing; raise min")
        if self.max is not None and self.max >= most:
            raise ValueError(f"{self.name} is never above {most:g}{clip}, so the limit asks for nothing; lower max")
        if self.min is not None and self.min > most:
            raise ValueError(f"{self.name} is never above {most:g}{clip}, so the limit cannot be kept; lower min")
        if self.max is not None and self.max < least:
            raise ValueError(f"{self.name} is never below {least:g}{clip}, so the limit cannot be kept; raise max")
        if self.max_regression is not None and self.higher_is_better and self.max_regression >= 1:
            raise ValueError(f"{self.name} can only be worse by less than 1, its whole; lower max_regression")

    @property
    def name(self) -> str:
        return full_name(self.metric, self.agg)

    @property
    def higher_is_better(self) -> bool:
        return is_better_higher(self.name)

    @property
    def is_statistical(self) -> bool:
        return self.kind != "equal"

    @property
    def subject(self) -> str:
        """The name of what is measured: metric, clip and slice."""
        clip = "" if self.clip is None else f" (clip {self.clip:g})"
        return f"{self.name}{clip}{self._slice_text}"

    @property
    def words(self) -> str:
        """The same in the words of a sentence."""
        clip = "" if self.clip is None else f", clipped at {self.clip:g},"
        return f"{metric_words(self.name)}{clip}{self._slice_text}"

    @property
    def _slice_text(self) -> str:
        return f" [{self.slice}]" if str(self.slice) else ""


class FiledSlice(Settings):
    """The pair of sides that was looked into; every pair of the run, unless named."""

    pair: SlicePair | None = None


class FiledCheck(MetricLimit):
    """One exact limit on what `headroom`, `localize` or `import` filed with the run."""

    slice: FiledSlice = FiledSlice()

    @model_validator(mode="after")
    def _can_pass_and_fail(self) -> Self:
        if self.slice.pair is not None and self.metric in HEADROOM | LOG:
            whose = "checkpoint" if self.metric in HEADROOM else "log"
            raise ValueError(f"{self.metric} is of the {whose}, not of a pair of dtypes; take slice out")
        metric = FILED_METRICS[self.metric]
        if (self.min is not None and self.min <= metric.least) or (self.max is not None and self.max >= metric.most):
            raise ValueError(
                f"{self.metric} lies between {metric.least:g} and {metric.most:g}, so the limit asks for nothing"
            )
        return self


class LayoutCheck(MetricLimit):
    """One exact limit on what the first step of a training differs by from that of another parallel layout."""

    @model_validator(mode="after")
    def _bounds_a_distance(self) -> Self:
        if self.kind == "min" or self.limit < 0:
            raise ValueError(f"{self.metric} is a distance from the baseline; give max, 0 or more")
        return self


class GateSettings(Settings):
    """How to decide."""

    alpha: float = Field(default=0.05, ge=1e-6, le=0.25)
    """The chance of any false failure, over all blocking checks and all looks."""
    min_sequences: Count = 64
    """The first look: the responses of each side that `compare` samples unless a flag asks for more."""
    min_prompts: Count = 64
    """A pass never rests on fewer prompts, however many responses they have (`reports/gate-power.md`)."""
    max_sequences: Count = 1024
    """The last look."""
    on_inconclusive: Literal["extend", "warn", "pass", "fail"] = "extend"
    growth: Literal["off", "warn", "error"] = "warn"
    """Of an imported log: whether a KL that grows over its steps is not judged, shown, or blocks."""
    verdict: Literal["off", "warn", "error"] = "warn"
    """Whether a bug by the run's own verdict is not judged, shown, or blocks."""
    preset: PresetName | None = None
    floor: str | None = None
    """The file that `gate calibrate` wrote, beside the gate file."""

    @model_validator(mode="after")
    def _steps_are_large_enough(self) -> "GateSettings":
        low, high = self.min_sequences, self.max_sequences
        if high < low:
            raise ValueError(f"max_sequences ({high}) is below min_sequences ({low}); raise it")
        if low < high < LEAST_STEP * low and self.on_inconclusive == "extend":
            raise ValueError(
                f"max_sequences ({high}) must be min_sequences ({low}), for one look, or {LEAST_STEP:g} times as many"
            )
        return self

    @property
    def looks(self) -> list[int]:
        """Declared looks in sequences; one where an inconclusive answer is not extended."""
        if self.on_inconclusive != "extend":
            return [self.min_sequences]
        return declared_looks(self.min_sequences, self.max_sequences)

    def prompts_for(self, num_sequences: int, samples_per_prompt: int) -> int:
        """How many prompts a look at so many sequences takes, where it may end in a pass."""
        return max(math.ceil(num_sequences / samples_per_prompt), self.min_prompts)


class GateFile(Settings):
    """Settings and the checks that are not off, those of the preset first; `filed` are those of `FILED_METRICS`,
    `layout` those of `LAYOUT_METRICS`, which stand alone.
    """

    settings: GateSettings
    checks: tuple[Check, ...]
    filed: tuple[FiledCheck, ...] = ()
    layout: tuple[LayoutCheck, ...] = ()

    def without_regressions(self) -> Self:
        """Without the checks that compare with a baseline."""
        return self.model_copy(update={"checks": tuple(check for check in self.checks if check.max_regression is None)})


AnyCheck = Check | FiledCheck | LayoutCheck
_Kind = TypeVar("_Kind", Check, FiledCheck, LayoutCheck)


def as_preset(name: str) -> PresetName:
    """
    Raises:
        UsageError: there is no preset of the name.
    """
    presets: dict[str, PresetName] = {preset: preset for preset in get_args(PresetName)}
    if name not in presets:
        raise UsageError(f"--preset {name} is unknown{did_you_mean(name, presets, '.')} Known are {', '.join(presets)}")
    return presets[name]


@cache
def preset_checks(name: PresetName) -> tuple[AnyCheck, ...]:
    """The checks of a preset, from `presets.toml`."""
    content = files("mismatch_probe.gate").joinpath("presets.toml").read_text(encoding="utf-8")
    return tuple(_parse_check(table, f"preset {name}") for table in tomllib.loads(content)[name])


def load_gate(source: GateSource, flag: str = "--config") -> GateFile:
    """Read a gate file: `[gate]`, and a `[[gate.check]]` for each limit; `flag` is the flag that named the file. A
    preset is the file that names it alone.

    Raises:
        UsageError: the file cannot be read, a key or a metric is unknown, a limit cannot be decided, or none is given.
    """
    if not isinstance(source, Path):
        return parse_gate({"gate": {"preset": source}}, f"--preset {source}")
    if not is_there(source):
        raise UsageError(
            f"there is no gate file {source}; {flag} names another one. Without a file: "
            "`mismatch-probe gate RUN --preset nemo-rl`. `mismatch-probe init gate` writes one to edit. Two lines are "
            'enough, here for the limits of NeMo-RL: [gate] and preset = "nemo-rl"'
        )
    return parse_gate(read_settings_file(source, flag=flag), str(source))


def parse_gate(content: Mapping[str, Any], where: str) -> GateFile:
    """Build the gate of a file that was parsed; `where` names the file in messages. Raises as `load_gate`."""
    unknown = sorted(content.keys() - {"gate"})
    if unknown and not isinstance(content[unknown[0]], Mapping | list):
        raise UsageError(f"{where}: setting {unknown[0]!r} stands before any table; write it below [gate]")
    if unknown:
        raise UsageError(f"{where}: table {unknown[0]!r} is unknown; a gate file has [gate] and [[gate.check]]")
    gate = content.get("gate")
    if not isinstance(gate, Mapping):
        raise UsageError(f"{where} has no [gate] table; a gate file has [gate] and [[gate.check]]")
    tables = gate.get("check", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: gate.check is no list of tables; write each check under [[gate.check]]")
    settings_table = {key: value for key, value in gate.items() if key != "check"}
    settings = parse_settings(GateSettings, settings_table, f"{where}, [gate]")
    own = [_parse_check(table, f"{where}, check {number}") for number, table in enumerate(tables, start=1)]
    repetition = next((check for index, check in enumerate(own) if check in own[:index]), None)
    if repetition is not None:
        raise UsageError(f"{where}: the check {repetition} is given twice; remove one")
    of_preset = () if settings.preset is None else preset_checks(settings.preset)
    active = [check for check in (*of_preset, *own) if check.level != "off"]
    if not active:
        raise UsageError(f"{where} asks for nothing, so it would pass anything; add a [[gate.check]], or preset")
    layout = tuple(_checks_of_kind(LayoutCheck, active))
    if layout and len(layout) < len(active):
        raise UsageError(
            f"{where}: {layout[0].metric} compares the metrics of two trainings, and other checks judge a run's "
            "tokens; write a gate file for each"
        )
    checks, filed = tuple(_checks_of_kind(Check, active)), tuple(_checks_of_kind(FiledCheck, active))
    return GateFile(settings=settings, checks=checks, filed=filed, layout=layout)


def _checks_of_kind(kind: type[_Kind], checks: Sequence[AnyCheck]) -> Iterator[_Kind]:
    return (check for check in checks if isinstance(check, kind))


def _parse_check(table: Mapping[str, Any], where: str) -> AnyCheck:
    _require_known_metric(table, where)
    metric = table.get("metric")
    if isinstance(metric, str) and metric in LAYOUT_METRICS:
        return parse_settings(LayoutCheck, table, where)
    if isinstance(metric, str) and metric in FILED_METRICS:
        return parse_settings(FiledCheck, table, where)
    return parse_settings(Check, table, where)


def _require_known_metric(table: Mapping[str, Any], where: str) -> None:
    """Require that the metric of a check exists, before anything else about the check is judged."""
    metric, aggregate = table.get("metric"), table.get("agg", "mean")
    if (
        not isinstance(metric, str)
        or metric in FILED_METRICS
        or metric in LAYOUT_METRICS
        or not isinstance(aggregate, str)
        or aggregate not in AGGREGATES
    ):
        return
    if full_name(metric, aggregate) in known_metrics():
        return
    if metric in known_metrics():
        aggregates = [other for other in AGGREGATES if full_name(metric, other) in known_metrics()]
        raise UsageError(f"{where}: {metric} has no aggregate {aggregate!r}; it has {', '.join(aggregates)}")
    hint = did_you_mean(metric, known_metrics() | FILED_METRICS.keys() | LAYOUT_METRICS.keys())
    raise UsageError(f"{where}: metric {metric!r} is unknown{hint}")
