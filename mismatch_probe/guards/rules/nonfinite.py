"""A metric that is NaN or infinite."""

import math
from typing import Literal

from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, write_value


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
