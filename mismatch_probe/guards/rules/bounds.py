"""Rules with a bound: a fixed limit, the most that earlier steps had, several metrics at once, and finite numbers."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from mismatch_probe.config.model import Count
from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    GuardSettings,
    MetricGuardSettings,
    Values,
    metric_words,
    not_a_number,
    write_value,
)


class LimitSettings(MetricGuardSettings):
    """The metric must stay at most `above` and at least `below`."""

    rule: Literal["limit"] = "limit"
    above: FiniteFloat | None = None
    below: FiniteFloat | None = None
    error: str | None = Field(default=None, min_length=1)
    """A metric that gives the standard error of this one; only what is `errors` of them beyond a bound breaks it."""
    errors: float = Field(default=5.0, gt=0, allow_inf_nan=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.error is None else (self.metric, self.error)

    @model_validator(mode="after")
    def _some_value_breaks_and_some_keeps_it(self) -> "LimitSettings":
        if self.above is None and self.below is None:
            raise ValueError("no limit given; give above, below, or both")
        if self.above is not None and self.below is not None and self.above <= self.below:
            raise ValueError(f"above ({self.above:g}) must be larger than below ({self.below:g})")
        return self

    def start(self) -> Guard:
        return FixedLimit(self)


class FixedLimit(Guard):
    """Needs no history, so a canary is judged too."""

    def __init__(self, settings: LimitSettings) -> None:
        self._metric = settings.metric
        self._upper = settings.above
        self._lower = settings.below
        self._error = settings.error
        self._errors = settings.errors

    def judge(self, values: Values) -> Breach | None:
        value = values[self._metric]
        margin = 0.0 if self._error is None else self._errors * values[self._error]
        if self._upper is not None and value > self._upper + margin:
            return self._breach_of_bounds(value, self._upper, "above")
        if self._lower is not None and value < self._lower - margin:
            return self._breach_of_bounds(value, self._lower, "below")
        return not_a_number(self._metric, value, self._upper if self._upper is not None else self._lower or 0.0)

    def judge_canary(self, values: Values) -> Breach | None:
        return self.judge(values)

    def _breach_of_bounds(self, value: float, threshold: float, side: str) -> Breach:
        sentence = f"{metric_words(self._metric)} is {write_value(value)}, {side} its limit of {write_value(threshold)}"
        return Breach(self._metric, value, threshold, sentence)


_STEPS_FOR_A_HIGHEST = 4
"""The highest of fewer says little of what may come."""


class BeyondSettings(MetricGuardSettings):
    """The metric is at most `ratio` times the highest value that `most` had in the `reference` steps before in which it
    was more than 0, once there are `_STEPS_FOR_A_HIGHEST` of them; and at most `early_ratio` times it while there are
    fewer, where that is set.
    """

    rule: Literal["beyond"] = "beyond"
    most: str = Field(min_length=1)
    ratio: float = Field(gt=1, allow_inf_nan=False)
    early_ratio: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    reference: Count = 16

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.most)

    def start(self) -> Guard:
        return Beyond(self)


class Beyond(Guard):
    """Remembers `most` of the last `reference` steps that kept the rule and had more than 0; a fault is not learnt."""

    remembers = ("earlier",)

    def __init__(self, settings: BeyondSettings) -> None:
        self._settings = settings
        self.earlier: Sequence[float] = []

    def judge(self, values: Values) -> Breach | None:
        settings, value, most = self._settings, values[self._settings.metric], values[self._settings.most]
        has_history = len(self.earlier) >= min(_STEPS_FOR_A_HIGHEST, settings.reference)
        ratio = settings.ratio if has_history else settings.early_ratio or math.inf
        level = max(self.earlier, default=0.0)
        threshold = ratio * level if level > 0 else math.inf
        number_breach = not_a_number(settings.metric, value, threshold) or not_a_number(settings.most, most, threshold)
        if number_breach is not None:
            return number_breach
        if value <= threshold:
            self.earlier = [*self.earlier, most][-settings.reference :] if most > 0 else self.earlier
            return None
        sentence = (
            f"{metric_words(settings.metric)} is {write_value(value)}, above {write_value(threshold)}, the most "
            f"allowed where {metric_words(settings.most)} was {write_value(level)}"
        )
        return Breach(settings.metric, value, threshold, sentence, level=level)


MetricNames = Annotated[tuple[str, ...], Field(strict=False)]


class FlatlineSettings(GuardSettings):
    """Broken where all of `zero` are exactly 0, none of `nonzero` is, all of `nonfinite` are NaN or infinite, and those
    of `at_least` are no less than the value given.
    """

    rule: Literal["flatline"] = "flatline"
    zero: MetricNames = ()
    nonzero: MetricNames = ()
    nonfinite: MetricNames = ()
    at_least: dict[str, FiniteFloat] = {}

    @model_validator(mode="after")
    def _names_a_sign_of_death(self) -> "FlatlineSettings":
        if not self.zero and not self.nonfinite:
            raise ValueError("no sign of a dead run given; name metrics under zero or nonfinite")
        duplicates = {name for name in self.metrics if self.metrics.count(name) > 1}
        if duplicates:
            raise ValueError(f"{min(duplicates)} is named twice; a metric has one state at a time")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.zero, *self.nonzero, *self.nonfinite, *self.at_least)

    def start(self) -> Guard:
        return Flatline(self)


class Flatline(Guard):
    """The signature of a dead FP16 run is loss 0, gradient norm 0 and reward NaN in one step."""

    def __init__(self, settings: FlatlineSettings) -> None:
        self._settings = settings

    def judge(self, values: Values) -> Breach | None:
        is_alive = (
            any(values[name] != 0 for name in self._settings.zero)
            or any(values[name] == 0 for name in self._settings.nonzero)
            or any(math.isfinite(values[name]) for name in self._settings.nonfinite)
            or not all(values[name] >= least for name, least in self._settings.at_least.items())
        )
        if is_alive:
            return None
        first = self._settings.metrics[0]
        evidence = ", ".join(f"{metric_words(name)} is {write_value(values[name])}" for name in self._settings.metrics)
        return Breach(first, values[first], 0.0, f"the step shows no life: {evidence}")


class NonfiniteSettings(MetricGuardSettings):
    """The metric must be a finite number."""

    rule: Literal["nonfinite"] = "nonfinite"

    def start(self) -> Guard:
        return Nonfinite(self)


class Nonfinite(Guard):
    """Needs no history, so a canary is judged too."""

    def __init__(self, settings: NonfiniteSettings) -> None:
        self._metric = settings.metric

    def judge(self, values: Values) -> Breach | None:
        value = values[self._metric]
        if math.isfinite(value):
            return None
        return Breach(self._metric, value, math.inf, f"{metric_words(self._metric)} is {write_value(value)}")

    def judge_canary(self, values: Values) -> Breach | None:
        return self.judge(values)
