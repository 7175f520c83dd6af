"""What is usual in a step against the most that any step before it had."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from mismatch_probe.config.model import Count
from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, MetricGuardSettings, Values, not_a_number, write_value

_STEPS_FOR_A_HIGHEST = 4
"""The highest of fewer says little of what may come."""


class BeyondSettings(MetricGuardSettings):
    """The metric is at most `ratio` times the highest value that `most` had in the `reference` steps before in which it
    was more than 0, once there are `_STEPS_FOR_A_HIGHEST` of them.
    """

    rule: Literal["beyond"] = "beyond"
    most: str = Field(min_length=1)
    ratio: float = Field(gt=1, allow_inf_nan=False)
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
        threshold = settings.ratio * max(self.earlier, default=0.0)
        broken = not_a_number(settings.metric, value, threshold) or not_a_number(settings.most, most, threshold)
        if broken is not None:
            return broken
        knows = len(self.earlier) >= min(_STEPS_FOR_A_HIGHEST, settings.reference)
        if not knows or value <= threshold:
            self.earlier = [*self.earlier, most][-settings.reference :] if most > 0 else self.earlier
            return None
        sentence = (
            f"{metric_words(settings.metric)} is {write_value(value)}, above {write_value(threshold)}, the most "
            f"allowed where {metric_words(settings.most)} was {write_value(threshold / settings.ratio)}"
        )
        return Breach(settings.metric, value, threshold, sentence, level=threshold / settings.ratio)
