"""A metric's recent level against its own earlier level."""

import statistics
from typing import Literal

from pydantic import Field

from mismatch_probe.config.model import Count
from mismatch_probe.train.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, not_a_number, write_value


class GrowthSettings(MetricGuardSettings):
    """The median of the last `window` steps over the median of the `reference` steps before them, at most `ratio`.

    direction: `up`, or `down` for the inverse ratio. least: a larger level (the recent one going up, the earlier one
    going down) that is not above it is never a breach.
    """

    rule: Literal["growth"] = "growth"
    ratio: float = Field(gt=1, allow_inf_nan=False)
    window: Count = 1
    reference: Count = 16
    direction: Literal["up", "down"] = "up"
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def start(self) -> Guard:
        return Growth(self)


class Growth(Guard):
    """The canary counts as the first earlier value. A broken step is forgotten, so the guard does not get used to a
    fault; a level of zero or less as well, since there is no ratio to it."""

    remembers = ("recent", "earlier")

    def __init__(self, settings: GrowthSettings) -> None:
        self._settings = settings
        self.recent: list[float] = []
        self.earlier: list[float] = []

    def judge(self, values: Values) -> Breach | None:
        value = values[self._settings.metric]
        broken = not_a_number(self._settings.metric, value, self._settings.least)
        if broken is not None:
            return broken
        line = [*self.recent, value]
        leaving, recent = line[: -self._settings.window], line[-self._settings.window :]
        earlier = [*self.earlier, *(level for level in leaving if level > 0)][-self._settings.reference :]
        breach = self._compared(earlier, recent)
        if breach is None:
            self.recent, self.earlier = recent, earlier
        return breach

    def judge_canary(self, values: Values) -> Breach | None:
        value = values[self._settings.metric]
        broken = not_a_number(self._settings.metric, value, self._settings.least)
        if broken is None and value > 0 and not self.earlier and not self.recent:
            self.earlier = [value]
        return broken

    def _compared(self, earlier: list[float], recent: list[float]) -> Breach | None:
        if not earlier or len(recent) < self._settings.window:
            return None
        before, now = statistics.median(earlier), statistics.median(recent)
        ratio, least, rising = self._settings.ratio, self._settings.least, self._settings.direction == "up"
        threshold = max(ratio * before, least) if rising else before / ratio
        if now <= threshold if rising else now >= threshold or before <= least:
            return None
        level = "is" if self._settings.window == 1 else f"has a median over {self._settings.window} steps of"
        sentence = (
            f"{self._settings.metric} {level} {write_value(now)}, {'above' if rising else 'below'} "
            f"{write_value(threshold)}, the {'most' if rising else 'least'} allowed after {write_value(before)}"
        )
        return Breach(self._settings.metric, now, threshold, sentence)
