"""Changes over many steps: a cumulative sum (CUSUM) from a level, and a trend that survives its own noise."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator
from scipy.special import ndtr, stdtrit

from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    MetricGuardSettings,
    ValueAndError,
    Values,
    metric_words,
    not_a_number,
    write_value,
)

_NORMAL_SD_PER_MAD = 1.4826


class CusumSettings(MetricGuardSettings):
    """C = max(0, C + z - k) stays within h, where z is the metric in standard deviations from its level at the start.

    The level and the deviation are the median and the scaled median absolute deviation of the first `window` steps, the
    deviation at least `spread`.
    """

    rule: Literal["cusum"] = "cusum"
    scale: Literal["log", "raw"] = "log"
    """Whether z is of the metric's logarithm or of the metric itself."""
    direction: Literal["up", "down"] = "up"
    """Which way a change counts."""
    k: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    h: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    window: int = Field(default=8, ge=2, lt=2**31)
    spread: float = Field(gt=0, allow_inf_nan=False)
    least: FiniteFloat = Field(default=1e-12, gt=0)
    """Under `log`, smaller values count as this one."""

    @model_validator(mode="after")
    def _waits_by_its_sum_alone(self) -> "CusumSettings":
        if self.patience != 1:
            raise ValueError("patience of a cusum is 1, since its sum starts again at every breach; raise h instead")
        return self

    def start(self) -> Guard:
        return Cusum(self)


class Cusum(Guard):
    """Silent while it learns the level; the sum starts again after a breach, the level stays. rising: steps for which
    the sum has been above 0."""

    remembers = ("first", "sum", "rising")

    def __init__(self, settings: CusumSettings) -> None:
        self._settings = settings
        self.first: list[float] = []
        self.sum = 0.0
        self.rising = 0

    def judge(self, values: Values) -> Breach | None:
        settings = self._settings
        value = values[settings.metric]
        number_breach = not_a_number(settings.metric, value, settings.h)
        if number_breach is not None:
            return number_breach
        number = math.log(max(value, settings.least)) if settings.scale == "log" else value
        if len(self.first) < settings.window:
            self.first = [*self.first, number]
            return None
        level = statistics.median(self.first)
        deviation = _NORMAL_SD_PER_MAD * statistics.median(abs(other - level) for other in self.first)
        distance = (number - level) / max(deviation, settings.spread)
        self.sum = max(0.0, self.sum + (distance if settings.direction == "up" else -distance) - settings.k)
        self.rising = self.rising + 1 if self.sum > 0 else 0
        total, steps = self.sum, self.rising
        if total <= settings.h:
            return None
        self.sum, self.rising = 0.0, 0
        level_text = write_value(math.exp(level) if settings.scale == "log" else level)
        return Breach(
            settings.metric,
            value,
            settings.h,
            f"{metric_words(settings.metric)} is {write_value(value)} after a level of {level_text} at the start, "
            f"and its sum of changes has reached {write_value(total)} standard deviations, above "
            f"{write_value(settings.h)}",
            steps=steps,
            level=math.exp(level) if settings.scale == "log" else level,
        )


_FEWEST = 12
"""Steps of the shortest stretch: its thirds have four."""
_NEWEST = 4
"""Steps that must be beyond, too: where they are not, the change is over."""

Direction = Literal["up", "down"]


class TrendSettings(MetricGuardSettings):
    """The mean of the last third of the newest 12, 18, 24, 36, 48, ... and at most `window` steps against that of the
    first.

    Broken where the metric went down by more than (1 - 1 / ratio), or up by more than (ratio - 1), times the size of
    its first third, that at least `least`; by more than `errors` standard errors; where the newest four steps are as
    far; and, where `other` is named, that one went `other_direction` by more than `other_errors` of its own.
    """

    rule: Literal["trend"] = "trend"
    direction: Direction = "down"
    ratio: float = Field(gt=1, allow_inf_nan=False)
    window: int = Field(default=72, ge=_FEWEST, lt=2**31)
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    error: str | None = Field(default=None, min_length=1)
    """A metric that gives a step's standard error. Without it the spread of the steps about a line in each third stands
    for it, and as many errors are asked for as Student's t has at the same probability.
    """
    errors: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    other: str | None = Field(default=None, min_length=1)
    other_direction: Direction = "down"
    other_error: str | None = Field(default=None, min_length=1)
    """The same of `other`."""
    other_errors: float = Field(default=2.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_an_other_for_its_error(self) -> "TrendSettings":
        if self.other is None and self.other_error is not None:
            raise ValueError("other_error is the error of a metric that other names; give other, too")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        names = (self.metric, self.error, self.other, self.other_error)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def start(self) -> Guard:
        return Trend(self)


class Trend(Guard):
    """Remembers the newest `window` steps: of the metric and, where there is one, of the other."""

    remembers = ("recent", "recent_other")

    def __init__(self, settings: TrendSettings) -> None:
        self._settings = settings
        self.recent: list[ValueAndError] = []
        self.recent_other: list[ValueAndError] = []

    def judge(self, values: Values) -> Breach | None:
        settings = self._settings
        for name in (settings.metric, settings.other):
            number_breach = None if name is None else not_a_number(name, values[name], 0.0)
            if number_breach is not None:
                return number_breach
        self.recent = self._with(self.recent, values, settings.metric, settings.error)
        if settings.other is not None:
            self.recent_other = self._with(self.recent_other, values, settings.other, settings.other_error)
        return next(filter(None, map(self._breach_of_trend, _stretches(len(self.recent)))), None)

    def _with(self, recent: list[ValueAndError], values: Values, name: str, error: str | None) -> list[ValueAndError]:
        error_of_step = None if error is None or not math.isfinite(values[error]) else values[error]
        return [*recent, (values[name], error_of_step)][-self._settings.window :]

    def _breach_of_trend(self, steps: int) -> Breach | None:
        """Of the newest `steps`."""
        settings = self._settings
        level_before, level = _trend_levels(self.recent, steps)
        size = max(abs(level_before), settings.least)
        is_fall = settings.direction == "down"
        threshold = (
            level_before - (1 - 1 / settings.ratio) * size if is_fall else level_before + (settings.ratio - 1) * size
        )
        newest = statistics.fmean(value for value, _ in self.recent[-_NEWEST:])
        if not (max(level, newest) < threshold if is_fall else min(level, newest) > threshold):
            return None
        if not _has_gone(settings.direction, self.recent[-steps:], settings.errors):
            return None
        other_change = ""
        if settings.other is not None:
            if not _has_gone(settings.other_direction, self.recent_other[-steps:], settings.other_errors):
                return None
            first, last = map(write_value, _trend_levels(self.recent_other, steps))
            other_change = f", while {metric_words(settings.other)} went from {first} to {last}"
        sentence = (
            f"{metric_words(settings.metric)} went from {write_value(level_before)} to {write_value(level)} over "
            f"{steps} steps{other_change}: means of the first and the last {steps // 3}"
        )
        return Breach(settings.metric, level, threshold, sentence, steps=steps - steps // 3, level=level_before)


def _stretches(most: int) -> Iterator[int]:
    """12, 18, 24, 36, 48, 72, ... steps, all divided by 3."""
    steps = _FEWEST
    while steps <= most:
        yield steps
        if steps * 3 // 2 <= most:
            yield steps * 3 // 2
        steps *= 2


def _trend_levels(recent: Sequence[ValueAndError], steps: int) -> tuple[float, float]:
    """Means of the first and of the last third of the newest `steps`."""
    values = [value for value, _ in recent[-steps:]]
    third = steps // 3
    return statistics.fmean(values[:third]), statistics.fmean(values[-third:])


def _has_gone(direction: Direction, recent: Sequence[ValueAndError], errors: float) -> bool:
    """Whether the last third is so many standard errors from the first.

    A step's error is the root mean square of those given, or the spread of steps about a line in each third where that
    is more: the change itself is no spread.
    """
    third = len(recent) // 3
    level_before, level = _trend_levels(recent, len(recent))
    parts = [[value for value, _ in recent[start : start + third]] for start in range(0, 3 * third, third)]
    freedom = 3 * (third - 2)
    spread = sum(map(_squares_about_a_line, parts)) / freedom
    variances = [error**2 for _, error in recent if error is not None]
    variance = max(spread, statistics.fmean(variances) if variances else 0.0)
    errors_due = errors if variances else -float(stdtrit(freedom, ndtr(-errors)))
    change = level - level_before if direction == "up" else level_before - level
    return change > errors_due * math.sqrt(2 * variance / third)


def _squares_about_a_line(values: Sequence[float]) -> float:
    """What is left of the sum of squares of equally spaced values by the straight line that fits them best."""
    slope, intercept = statistics.linear_regression(range(len(values)), values)
    return sum((value - intercept - slope * place) ** 2 for place, value in enumerate(values))
