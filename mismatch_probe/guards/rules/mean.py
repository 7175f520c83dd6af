"""The mean of a metric over the newest steps against its expected value, or against the canary's floor."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, FiniteFloat

from mismatch_probe.config.model import Count
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    MetricGuardSettings,
    Values,
    metric_words,
    not_a_number,
    write_value,
)

_A_DOUBLING = 4
"""Numbers of steps that are tried from one to twice as many: fewer see a small change later."""


class MeanSettings(MetricGuardSettings):
    """The mean of the last 1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, ... and at most `window` steps, powers of the fourth
    root of 2, must be within `errors` of its standard errors, and `tolerance`, of `expected`.

    Where the newest step alone is as far from that mean, what broke the rule is over: the steps before it are
    forgotten.
    """

    rule: Literal["mean"] = "mean"
    error: str = Field(min_length=1)
    """A metric that gives the standard error of this one at each step."""
    expected: FiniteFloat = 0.0
    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    window: Count = 32
    errors: float = Field(default=5.0, gt=0, allow_inf_nan=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.error)

    def tolerance_of(self, error_of_mean: float) -> float:
        """How far from `expected` a mean with this standard error may be."""
        return self.tolerance + self.errors * error_of_mean

    def sees(self, values: Values) -> str:
        error = values.get(self.error, math.nan)
        if not math.isfinite(error):
            return ""
        nearest, farthest = (write_value(self.tolerance_of(error / math.sqrt(steps))) for steps in (1, self.window))
        return (
            f"{metric_words(self.metric)}, where it is {nearest} from {write_value(self.expected)} in one step like "
            f"the last, {farthest} in {self.window}"
        )

    def start(self) -> Guard:
        return Mean(self)


class Mean(Guard):
    """Remembers the last `window` steps, each a value and its error."""

    remembers = ("recent",)

    def __init__(self, settings: MeanSettings) -> None:
        self._settings = settings
        self.recent: list[list[float]] = []

    def judge(self, values: Values) -> Breach | None:
        settings = self._settings
        value, error = values[settings.metric], values[settings.error]
        number_breach = not_a_number(settings.metric, value, settings.tolerance)
        if number_breach is not None or not math.isfinite(error):
            return number_breach
        self.recent = [*self.recent, [value, error]][-settings.window :]
        for steps, mean, error_of_mean in newest_means(self.recent):
            tolerance = settings.tolerance_of(error_of_mean)
            if abs(mean - settings.expected) > tolerance:
                if abs(value - mean) > settings.tolerance_of(error):
                    self.recent = self.recent[-1:]
                    return None
                sentence = (
                    f"{metric_words(settings.metric)} is {write_mean(mean, steps)}, more than {write_value(tolerance)} "
                    f"from the {write_value(settings.expected)} that it is in expectation"
                )
                return Breach(settings.metric, mean, tolerance, sentence, steps=steps)
        return None


def newest_means(recent: Sequence[Sequence[float]]) -> Iterator[tuple[int, float, float]]:
    """Of values and their errors, oldest first: how many of the newest, their mean, and its standard error."""
    most = math.floor(_A_DOUBLING * math.log2(len(recent))) if recent else -1
    for steps in sorted({int(2 ** (power / _A_DOUBLING)) for power in range(most + 1)}):
        values, errors = zip(*recent[-steps:], strict=True)
        yield steps, math.fsum(values) / steps, math.sqrt(math.fsum(error**2 for error in errors)) / steps


def write_mean(mean: float, steps: int) -> str:
    """A mean over so many of the newest steps, in words."""
    return write_value(mean) if steps == 1 else f"{write_value(mean)} on average over {steps} steps"


_STEPS_OF_A_FLOOR = 16
"""At most, the canary included: what comes later may be a fault."""


class CanaryFloorSettings(MetricGuardSettings):
    """The metric must stay within `times` its value at the first canary, or within `least` where that is more."""

    rule: Literal["floor"] = "floor"
    times: float = Field(gt=1, allow_inf_nan=False)
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    error: str | None = Field(default=None, min_length=1)
    """A metric that gives the standard error of this one at each step. The floor is then the mean of the canary and of
    the steps after it, until that is `errors` of its standard errors above 0, at most of `_STEPS_OF_A_FLOOR`, and
    counts as so many errors more. A breach is a mean of the newest 1, 2, 3, 4, 5, 6, 8, ... steps, at most `window`,
    that is beyond by `errors` of its own, and a newest step that may be beyond too.
    """
    errors: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    window: Count = 32

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.error is None else (self.metric, self.error)

    @property
    def canary_metrics(self) -> tuple[str, ...]:
        return self.metrics

    @property
    def moving_bound(self) -> Literal["upper", "lower"] | None:
        return "upper"

    def start(self) -> Guard:
        return CanaryFloor(self)


class CanaryFloor(Guard):
    """The first canary sets the floor, or the first step after it that has a number; later steps are compared with it.

    learnt: what the floor is the mean of; recent: the newest steps; each a value and its error. A state of the version
    before has the floor alone.
    """

    remembers = ("floor", "floor_error", "learnt", "recent", "was_asked")

    def __init__(self, settings: CanaryFloorSettings) -> None:
        self._settings = settings
        self.floor: float | None = None
        self.floor_error = 0.0
        self.learnt: list[list[float]] = []
        self.recent: list[list[float]] = []

    def judge(self, values: Values) -> Breach | None:
        entry = self._value_and_error(values)
        number_breach = not_a_number(self._settings.metric, entry[0], self._settings.least)
        if number_breach is not None:
            return number_breach
        if self.floor is None and self.was_asked:
            self._learn_floor(entry)
        if self.floor is None:
            raise UsageError(
                f"guard {self._settings.name!r} is relative to the canary's {self._settings.metric}, which was not "
                "measured; run the canary first, or use the rule limit"
            )
        self.recent = [*self.recent, entry][-self._settings.window :]
        breach = self._breach_of_floor()
        if breach is None and self._is_unsure() and entry != self.learnt[-1]:  # the canary is the first step's too
            self._learn_floor(entry)
        return breach

    def judge_canary(self, values: Values) -> Breach | None:
        entry = self._value_and_error(values)
        self.was_asked = True
        if self.floor is not None:
            return self.judge(values)
        number_breach = not_a_number(self._settings.metric, entry[0], self._settings.least)
        if number_breach is None:
            self._learn_floor(entry)
        return number_breach

    def _value_and_error(self, values: Values) -> list[float]:
        """This step's value and its error, 0 where none is asked for and the value itself where it is no number."""
        value = values[self._settings.metric]
        error = 0.0 if self._settings.error is None else values[self._settings.error]
        return [value, error if math.isfinite(error) else abs(value)]

    def _is_unsure(self) -> bool:
        has_floor = self.floor is None or self.floor >= self._settings.errors * self.floor_error
        return not has_floor and len(self.learnt) < _STEPS_OF_A_FLOOR

    def _learn_floor(self, entry: list[float]) -> None:
        self.learnt = [*self.learnt, entry]
        values, errors = zip(*self.learnt, strict=True)
        self.floor, self.floor_error = statistics.fmean(values), math.hypot(*errors) / len(errors)

    def _breach_of_floor(self) -> Breach | None:
        settings = self._settings
        assert self.floor is not None
        threshold = max(settings.times * (self.floor + settings.errors * self.floor_error), settings.least)
        self.bound = threshold
        value, error = self.recent[-1]
        if value + settings.errors * error <= threshold:
            return None
        for steps, mean, error_of_mean in newest_means(self.recent):
            if mean - settings.errors * error_of_mean > threshold:
                sentence = (
                    f"{metric_words(settings.metric)} is {write_mean(mean, steps)}, above {write_value(threshold)}, "
                    f"the most allowed after a canary of {write_value(self.floor)}"
                )
                return Breach(settings.metric, mean, threshold, sentence, steps=steps)
        return None
