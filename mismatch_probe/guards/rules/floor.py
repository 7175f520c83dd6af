"""A metric against the floor that the canary measured."""

from typing import Literal

from pydantic import Field

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, not_a_number, write_value


class CanaryFloorSettings(MetricGuardSettings):
    """The metric must stay within `times` its value at the first canary, or within `least` where that is more."""

    rule: Literal["floor"] = "floor"
    times: float = Field(gt=1, allow_inf_nan=False)
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @property
    def canary_metrics(self) -> tuple[str, ...]:
        return self.metrics

    def start(self) -> Guard:
        return CanaryFloor(self)


class CanaryFloor(Guard):
    """The first canary sets the floor, or the first step after it that has a number; the rest is held against it."""

    remembers = ("floor", "was_asked")

    def __init__(self, settings: CanaryFloorSettings) -> None:
        self._settings = settings
        self.floor: float | None = None
        self.was_asked = False

    def judge(self, values: Values) -> Breach | None:
        broken = not_a_number(self._settings.metric, values[self._settings.metric], self._settings.least)
        if broken is not None:
            return broken
        if self.floor is None and self.was_asked:
            self.floor = values[self._settings.metric]
        if self.floor is None:
            raise UsageError(
                f"guard {self._settings.name!r} is relative to the canary's {self._settings.metric}, which was not "
                "measured; run the canary first, or use the rule limit"
            )
        value = values[self._settings.metric]
        threshold = self.bound = max(self._settings.times * self.floor, self._settings.least)
        if value <= threshold:
            return None
        return Breach(
            self._settings.metric,
            value,
            threshold,
            f"{metric_words(self._settings.metric)} is {write_value(value)}, above {write_value(threshold)}, the most "
            f"allowed after a canary of {write_value(self.floor)}",
        )

    def judge_canary(self, values: Values) -> Breach | None:
        value = values[self._settings.metric]
        self.was_asked = True
        if self.floor is not None:
            return self.judge(values)
        broken = not_a_number(self._settings.metric, value, self._settings.least)
        if broken is None:
            self.floor = value
        return broken
