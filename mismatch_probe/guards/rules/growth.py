"""A metric's recent level against its own earlier level."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from mismatch_probe.config.model import Count, CountOrNone
from mismatch_probe.guards.rules.base import (
    Breach,
    Guard,
    MetricGuardSettings,
    ValueAndError,
    Values,
    metric_words,
    not_a_number,
    write_value,
)

_STEPS_FOR_A_SPREAD = 12
"""Fewer do not say how far steps differ."""
_STEPS_BESIDE_ERRORS = 4
"""As many may correct the errors that steps give; of fewer, a fall that has begun is a part of their spread."""


class GrowthSettings(MetricGuardSettings):
    """The median of the last `window` steps over the median of the `reference` steps before them, at most `ratio`."""

    rule: Literal["growth"] = "growth"
    ratio: float = Field(gt=1, allow_inf_nan=False)
    window: Count = 1
    reference: Count = 16
    needs: Count = 1
    """Earlier steps, the canary among them, without which it does not judge."""
    direction: Literal["up", "down"] = "up"
    """`up`, or `down` for the inverse ratio."""
    of_highest: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A level of at most so many times the highest one that the metric ever had is no breach; for `up`."""
    stands: CountOrNone = 0
    """Steps that the highest level must have lasted before a breach, so that a warm-up is not one."""
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A larger level (the recent one going up, the earlier one going down) that is not above it is never a breach."""
    error: str | None = Field(default=None, min_length=1)
    """A metric that gives the standard error of this one at each step; a change is then a breach once the mean of the
    steps since it began is `errors` standard errors from the mean of those before.
    """
    errors: float = Field(default=5.0, gt=0, allow_inf_nan=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.error is None else (self.metric, self.error)

    @property
    def steps_of_a_value(self) -> int:
        return self.window

    @property
    def moving_bound(self) -> Literal["upper", "lower"] | None:
        return "upper" if self.direction == "up" else "lower"

    def start(self) -> Guard:
        return Growth(self)


class Growth(Guard):
    """The canary counts as the first earlier value.

    `recent` are the last `window` steps, each a value and its error. While their median is beyond the ratio, they are
    all steps since it came to be so, up to `reference`. They always move on. The oldest `forgotten` of them had a part
    in a breach and are not learnt, so that the guard does not get used to a fault. A guard on growth (`up`) does not
    learn a value of zero or less either, since no ratio to it exists; a guard on a fall does, or its level would be too
    high.
    """

    remembers = ("recent", "earlier", "has_left", "forgotten", "highest", "stood")

    def __init__(self, settings: GrowthSettings) -> None:
        self._settings = settings
        self.recent: list[ValueAndError] = []
        self.earlier: list[ValueAndError] = []
        self.has_left = False
        self.forgotten = 0
        self.highest = 0.0
        self.stood = 0

    def judge(self, values: Values) -> Breach | None:
        settings = self._settings
        value = values[settings.metric]
        number_breach = not_a_number(settings.metric, value, settings.least)
        if number_breach is not None:
            return number_breach
        error = math.nan if settings.error is None else values[settings.error]
        self.recent = [*self.recent, (value, error if math.isfinite(error) else None)]
        if not self.has_left:
            self._learn_earlier()
        self.has_left = self._leaves()
        if not self.has_left:
            self._learn_earlier()
            return None
        longest = max(settings.window, settings.reference)
        self.forgotten = max(0, self.forgotten - max(0, len(self.recent) - longest))
        self.recent = self.recent[-longest:]
        if settings.error is not None and not self._is_beyond_its_error():
            return None
        self.forgotten = len(self.recent)
        return self._breach_of_growth()

    def judge_canary(self, values: Values) -> Breach | None:
        value = values[self._settings.metric]
        number_breach = not_a_number(self._settings.metric, value, self._settings.least)
        if number_breach is None and value > 0 and not self.earlier and not self.recent:
            self.earlier = [(value, None)]
        return number_breach

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.recent, self.earlier = (
            [_entry_of_state(entry) for entry in self.recent],
            [_entry_of_state(entry) for entry in self.earlier],
        )

    def _learn_earlier(self) -> None:
        """What is no longer recent becomes earlier, but for what is to be forgotten."""
        num_leaving = max(0, len(self.recent) - self._settings.window)
        entries = self.recent[self.forgotten : num_leaving]
        self.recent = self.recent[num_leaving:]
        self.forgotten = max(0, self.forgotten - num_leaving)
        entries_to_learn = [entry for entry in entries if entry[0] > 0 or self._settings.direction == "down"]
        self.earlier = [*self.earlier, *entries_to_learn][-self._settings.reference :]
        for value, _ in entries_to_learn:
            self.stood = 1 if value > self.highest else self.stood + 1
            self.highest = max(self.highest, value)

    def _median_levels(self) -> tuple[float, float]:
        """Medians of the earlier steps and of the last `window`."""
        steps_before, recent_steps = self.earlier, self.recent[-self._settings.window :]
        return statistics.median(value for value, _ in steps_before), statistics.median(
            value for value, _ in recent_steps
        )

    def _threshold(self, level_before: float) -> float:
        settings = self._settings
        if settings.direction == "down":
            return level_before / settings.ratio
        most = 0.0 if settings.of_highest is None else settings.of_highest * self.highest
        return max(settings.ratio * level_before, settings.least, most)

    def _leaves(self) -> bool:
        """Whether the recent level is beyond the ratio."""
        self.bound = None
        if len(self.earlier) < min(self._settings.needs, self._settings.reference):
            return False
        if len(self.recent) < self._settings.window or self.stood < self._settings.stands:
            return False
        level_before, level = self._median_levels()
        is_rise = self._settings.direction == "up"
        if not is_rise and level_before <= self._settings.least:
            return False
        self.bound = self._threshold(level_before)
        return level > self.bound if is_rise else level < self.bound

    def _is_beyond_its_error(self) -> bool:
        """Whether the mean since the departure is `errors` standard errors from the mean before.

        A step's error is the root mean square of those given, or the spread of the earlier steps where that is more
        and they are not too few.
        """
        values_before, recent_values = ([value for value, _ in part] for part in (self.earlier, self.recent))
        step_errors = [error for _, error in (*self.earlier, *self.recent) if error is not None]
        if not step_errors and len(values_before) < min(_STEPS_FOR_A_SPREAD, self._settings.reference):
            return False
        spread = statistics.variance(values_before) if len(values_before) >= _STEPS_BESIDE_ERRORS else 0.0
        variance = max(statistics.fmean(error**2 for error in step_errors) if step_errors else 0.0, spread)
        change = statistics.fmean(recent_values) - statistics.fmean(values_before)
        error_of_change = math.sqrt(variance * (1 / len(recent_values) + 1 / len(values_before)))
        return (change if self._settings.direction == "up" else -change) > self._settings.errors * error_of_change

    def _breach_of_growth(self) -> Breach:
        settings, (level_before, value) = self._settings, self._median_levels()
        threshold, is_rise = self._threshold(level_before), settings.direction == "up"
        level = "is" if settings.window == 1 else f"has a median over {settings.window} steps of"
        sentence = (
            f"{metric_words(settings.metric)} {level} {write_value(value)}, {'above' if is_rise else 'below'} "
            f"{write_value(threshold)}, the {'most' if is_rise else 'least'} allowed after {write_value(level_before)}"
        )
        return Breach(settings.metric, value, threshold, sentence, steps=len(self.recent), level=level_before)


def _entry_of_state(entry: float | Sequence[float | None]) -> ValueAndError:
    """As `state` gave it; earlier versions saved plain values."""
    if isinstance(entry, float | int):
        return float(entry), None
    value, error = entry
    assert value is not None
    return value, error
