"""The mean of a metric over the newest steps against the value it has in expectation, by standard errors."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, FiniteFloat

from mismatch_probe.config.model import Count
from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, not_a_number, write_value

_A_DOUBLING = 4
"""Numbers of steps that are tried from one to twice as many: fewer see a small change later."""


class MeanSettings(MetricGuardSettings):
    """The mean of the last 1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, ... and at most `window` steps, powers of the fourth
    root of 2, must be within `errors` of its standard errors, and `tolerance`, of `expected`. error: a metric that
    gives the standard error of this one at each step. Where the newest step alone is as far from that mean, what broke
    the rule is over: the steps before it are forgotten.
    """

    rule: Literal["mean"] = "mean"
    error: str = Field(min_length=1)
    expected: FiniteFloat = 0.0
    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    window: Count = 32
    errors: float = Field(default=5.0, gt=0, allow_inf_nan=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.error)

    def allowed(self, error_of_mean: float) -> float:
        """How far from `expected` a mean with this standard error may be."""
        return self.tolerance + self.errors * error_of_mean

    def sees(self, values: Values) -> str:
        error = values.get(self.error, math.nan)
        if not math.isfinite(error):
            return ""
        nearest, far = (write_value(self.allowed(error / math.sqrt(steps))) for steps in (1, self.window))
        return (
            f"{metric_words(self.metric)}, where it is {nearest} from {write_value(self.expected)} in one step like "
            f"the last, {far} in {self.window}"
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
        broken = not_a_number(settings.metric, value, settings.tolerance)
        if broken is not None or not math.isfinite(error):
            return broken
        self.recent = [*self.recent, [value, error]][-settings.window :]
        for steps, mean, error_of_mean in newest_means(self.recent):
            allowed = settings.allowed(error_of_mean)
            if abs(mean - settings.expected) > allowed:
                if abs(value - mean) > settings.allowed(error):
                    self.recent = self.recent[-1:]
                    return None
                sentence = (
                    f"{metric_words(settings.metric)} is {write_mean(mean, steps)}, more than {write_value(allowed)} "
                    f"from the {write_value(settings.expected)} that it is in expectation"
                )
                return Breach(settings.metric, mean, allowed, sentence, steps=steps)
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
