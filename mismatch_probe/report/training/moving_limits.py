"""What guards held each step against where that moves with the run, by the rules themselves on the recorded metrics."""

import math
from collections.abc import Iterator
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import of_canary
from mismatch_probe.guards.load import recorded_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.growth import GrowthSettings
from mismatch_probe.report.figures.limits import MovingLimit
from mismatch_probe.report.training.course import Course
from mismatch_probe.report.training.guard_words import asked_words

_MOVING: Final = ("growth", "floor")


def moving_limits_on(metric: str, course: Course) -> Iterator[MovingLimit]:
    """Of guards whose rule sets a step against earlier ones. One that this version does not know has none."""
    for table in course.manifest.guards:
        if table.get("rule") not in _MOVING or table.get("metric") != metric:
            continue
        try:
            [settings] = recorded_guards([table], "the manifest")
        except UsageError:
            continue
        is_upper = not isinstance(settings, GrowthSettings) or settings.direction == "up"
        words = _words(settings, "above" if is_upper else "below")
        yield MovingLimit(course.steps.tolist(), _bounds(settings, course), is_upper, words)


def _bounds(settings: GuardSettings, course: Course) -> list[float | None]:
    """Of each step; None where the guard had none. The first step is also the canary."""
    guard, columns = settings.start(), {name: course.metric(name) for name in settings.metrics}
    bounds: list[float | None] = []
    for row in range(len(course.steps)):
        values = {name: float(column[row]) for name, column in columns.items()}
        if math.isnan(values[settings.metrics[0]]):
            bounds.append(None)
            continue
        if row == 0 and of_canary(values) == values:
            guard.judge_canary(values)
        try:
            guard.judge(values)
        except UsageError:  # no canary measured what the guard is relative to
            return [None] * len(course.steps)
        bounds.append(guard.bound)
    return bounds


def _words(settings: GuardSettings, side: str) -> str:
    window = settings.window if isinstance(settings, GrowthSettings) else 1
    level = "" if window == 1 else f"with its median over {window} steps "
    asked = asked_words(settings.model_dump(mode="json")["actions"])
    return f"guard {settings.name}: {level}{side} this it asks to {asked}"
