"""Several metrics that together say a run is dead: exactly zero, no number, or too large, where a living run is not."""

import math
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.guards.rules.base import Breach, Guard, GuardSettings, Values, write_value

Names = Annotated[tuple[str, ...], Field(strict=False)]


class FlatlineSettings(GuardSettings):
    """Broken where all of `zero` are exactly 0, none of `nonzero` is, all of `nonfinite` are NaN or infinite, and those
    of `at_least` are no less than the value given.
    """

    rule: Literal["flatline"] = "flatline"
    zero: Names = ()
    nonzero: Names = ()
    nonfinite: Names = ()
    at_least: dict[str, FiniteFloat] = {}

    @model_validator(mode="after")
    def _names_a_sign_of_death(self) -> "FlatlineSettings":
        if not self.zero and not self.nonfinite:
            raise ValueError("no sign of a dead run given; name metrics under zero or nonfinite")
        repeated = {name for name in self.metrics if self.metrics.count(name) > 1}
        if repeated:
            raise ValueError(f"{min(repeated)} is named twice; a metric has one state at a time")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.zero, *self.nonzero, *self.nonfinite, *self.at_least)

    def start(self) -> Guard:
        return Flatline(self)


class Flatline(Guard):
    """The signature of a dead FP16 run is loss 0, gradient norm 0 and reward NaN in one step."""

    def __init__(self, settings: FlatlineSettings) -> None:
        self._settings = settings

    def judge(self, values: Values) -> Breach | None:
        alive = (
            any(values[name] != 0 for name in self._settings.zero)
            or any(values[name] == 0 for name in self._settings.nonzero)
            or any(math.isfinite(values[name]) for name in self._settings.nonfinite)
            or not all(values[name] >= least for name, least in self._settings.at_least.items())
        )
        if alive:
            return None
        first = self._settings.metrics[0]
        seen = ", ".join(f"{metric_words(name)} is {write_value(values[name])}" for name in self._settings.metrics)
        return Breach(first, values[first], 0.0, f"the step shows no life: {seen}")
