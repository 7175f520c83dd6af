"""A fixed bound above, below, or both."""

from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, not_a_number, write_value


class LimitSettings(MetricGuardSettings):
    """The metric must stay at most `above` and at least `below`.

    error: a metric that gives the standard error of this one; only what is `errors` of them beyond a bound breaks it.
    """

    rule: Literal["limit"] = "limit"
    above: FiniteFloat | None = None
    below: FiniteFloat | None = None
    error: str | None = Field(default=None, min_length=1)
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
        return Limit(self)


class Limit(Guard):
    """Needs no history, so a canary is judged too."""

    def __init__(self, settings: LimitSettings) -> None:
        self._metric = settings.metric
        self._above = settings.above
        self._below = settings.below
        self._error = settings.error
        self._errors = settings.errors

    def judge(self, values: Values) -> Breach | None:
        value = values[self._metric]
        allowed = 0.0 if self._error is None else self._errors * values[self._error]
        if self._above is not None and value > self._above + allowed:
            return self._breach(value, self._above, "above")
        if self._below is not None and value < self._below - allowed:
            return self._breach(value, self._below, "below")
        return not_a_number(self._metric, value, self._above if self._above is not None else self._below or 0.0)

    def judge_canary(self, values: Values) -> Breach | None:
        return self.judge(values)

    def _breach(self, value: float, threshold: float, side: str) -> Breach:
        sentence = f"{metric_words(self._metric)} is {write_value(value)}, {side} its limit of {write_value(threshold)}"
        return Breach(self._metric, value, threshold, sentence)
