"""What may be otherwise than declared: departures that can be computed, and families of them with a free parameter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.judging import Judge
from mismatch_probe.explain.setup import Context, Rope, WeightsPlan
from mismatch_probe.explain.tokens import Floats
from mismatch_probe.records.explanation import Departure, Part

Edit = Callable[[Floats, Judge], Floats]
"""From a prediction [T] to what the log's line would hold of it [T], NaN where it holds nothing."""


def departure(part: Part, code: str, what: str, value: float | None = None) -> Departure:
    return Departure(part=part, code=str(code), what=what, value=value)


@dataclass(frozen=True)
class Option:
    """A departure and what it changes of the computation; what is None stays as declared."""

    departure: Departure
    weights: WeightsPlan | None = None
    rope: Rope | None = None
    context: Context | None = None
    distribution: Distribution | None = None
    edit: Edit | None = None
    dtype: Dtype | None = None


@dataclass(frozen=True)
class Family:
    """Departures of one kind, of which the log chooses: one for all responses, or for each its own or none.

    free_temperature: the temperature is fitted besides, and the options are one.
    """

    name: str
    part: Part
    options: tuple[Option, ...]
    chosen_for: Literal["log", "response"] = "log"
    free_temperature: bool = False

    @property
    def num_fitted(self) -> int:
        """Parameters that the log decides."""
        return int(self.free_temperature or len(self.options) > 1 or self.chosen_for == "response")
