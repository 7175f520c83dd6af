"""One-sided change detection: E. S. Page, Continuous inspection schemes, Biometrika 41 (1954) 100-115."""

import math
import statistics
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    MetricGuardSettings,
    Values,
    metric_words,
    not_a_number,
    write_value,
)

_NORMAL_SD_PER_MAD = 1.4826


class CusumSettings(MetricGuardSettings):
    """C = max(0, C + z - k) stays within h, where z is the metric in standard deviations from its level at the start.

    The level and the deviation are the median and the scaled median absolute deviation of the first `window` steps, the
    deviation at least `spread`. scale: z of the metric's logarithm or of the metric itself. least: under `log`, smaller
    values count as this one. direction: which way a change counts.
    """

    rule: Literal["cusum"] = "cusum"
    scale: Literal["log", "raw"] = "log"
    direction: Literal["up", "down"] = "up"
    k: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    h: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    window: int = Field(default=8, ge=2, lt=2**31)
    spread: float = Field(gt=0, allow_inf_nan=False)
    least: FiniteFloat = Field(default=1e-12, gt=0)

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
        broken = not_a_number(settings.metric, value, settings.h)
        if broken is not None:
            return broken
        seen = math.log(max(value, settings.least)) if settings.scale == "log" else value
        if len(self.first) < settings.window:
            self.first = [*self.first, seen]
            return None
        level = statistics.median(self.first)
        deviation = _NORMAL_SD_PER_MAD * statistics.median(abs(other - level) for other in self.first)
        away = (seen - level) / max(deviation, settings.spread)
        self.sum = max(0.0, self.sum + (away if settings.direction == "up" else -away) - settings.k)
        self.rising = self.rising + 1 if self.sum > 0 else 0
        reached, steps = self.sum, self.rising
        if reached <= settings.h:
            return None
        self.sum, self.rising = 0.0, 0
        level_written = write_value(math.exp(level) if settings.scale == "log" else level)
        return Breach(
            settings.metric,
            value,
            settings.h,
            f"{metric_words(settings.metric)} is {write_value(value)} after a level of {level_written} at the start, "
            f"and its sum of changes has reached {write_value(reached)} standard deviations, above "
            f"{write_value(settings.h)}",
            steps=steps,
            level=math.exp(level) if settings.scale == "log" else level,
        )
