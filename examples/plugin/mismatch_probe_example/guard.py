"""A guard rule: one metric is at most so many times another, in the same step."""

from typing import Literal

from pydantic import Field

from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    MetricGuardSettings,
    Values,
    metric_words,
    not_a_number,
    write_value,
)


class RatioSettings(MetricGuardSettings):
    """`metric` is at most `above` times `to`."""

    rule: Literal["ratio"] = "ratio"
    to: str = Field(min_length=1)
    above: float = Field(gt=0, allow_inf_nan=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.to)

    def start(self) -> Guard:
        return Ratio(self)


class Ratio(Guard):
    """Needs no history."""

    def __init__(self, settings: RatioSettings) -> None:
        self._settings = settings

    def judge(self, values: Values) -> Breach | None:
        metric, to = self._settings.metric, self._settings.to
        value, threshold = values[metric], self._settings.above * values[to]
        if value > threshold:
            sentence = (
                f"{metric_words(metric)} is {write_value(value)}, above {write_value(self._settings.above)} times "
                f"{metric_words(to)} ({write_value(values[to])})"
            )
            return Breach(metric, value, threshold, sentence)
        return not_a_number(metric, value, threshold) or not_a_number(to, values[to], threshold)
