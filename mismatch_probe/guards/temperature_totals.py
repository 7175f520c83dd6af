"""The temperature of one side over that of the other, from sums that ranks add up."""

import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from scipy.special import stdtrit

from mismatch_probe.stats.rounding import LeastSquares, temperature_columns
from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.stats.totals import AddableTotals

_CERTAIN: Final = 1e-3
_CONFIDENCE: Final = 0.95
"""One-sided, of a step's fit: the guard asks for two steps in a row, and leaves a tenth besides."""
_LEAST_FREEDOM: Final = 1.1
"""Of a fit's error: with fewer degrees of freedom it hangs on one prompt."""


@dataclass(frozen=True)
class TemperatureTotals(AddableTotals):
    """Of fits of T_pi / T_mu to d by `stats.temperature`: each part's own, weighted by the squares of the surprise that
    the entropies leave. information: these weights; departures: times the coefficient; errors: squares of weight times
    its standard error; errors_squared: squares of these over the degrees of freedom of each.

    Of a part that hangs on one prompt only other parts tell the error. lone: its weight, lone_departures: times the
    coefficient, and squares and products of the two.
    """

    signed = ("departures", "lone_departures", "lone_products")

    information: float = 0.0
    departures: float = 0.0
    errors: float = 0.0
    errors_squared: float = 0.0
    lone: float = 0.0
    lone_departures: float = 0.0
    lone_squared: float = 0.0
    lone_products: float = 0.0
    lone_departures_squared: float = 0.0

    @classmethod
    def of(cls, diff: Floats, log_pi: Floats, entropy: Floats, prompts: Ints) -> Self:
        """Of tokens [T], each with the number of its prompt, whose responses may be copies of each other for long;
        nothing where nothing surprises pi.
        """
        if np.std(log_pi + entropy) < _CERTAIN:
            return cls()
        fit = LeastSquares(temperature_columns(log_pi, entropy), diff)
        information = fit.first_information()
        if information == 0:
            return cls()
        departures = float(information * fit.coefficients[0])
        error, freedom = fit.first_error(prompts)
        if freedom < _LEAST_FREEDOM:
            return cls(
                lone=information,
                lone_departures=departures,
                lone_squared=information**2,
                lone_products=information * departures,
                lone_departures_squared=departures**2,
            )
        errors = (information * error) ** 2
        return cls(information, departures, errors, errors**2 / freedom)

    @property
    def ratio(self) -> float:
        """T_pi / T_mu, nearer to 1 by as many standard errors as Student's t has at `_CONFIDENCE`, more where the fit
        hangs on a few prompts; 1 where within, and where nothing can be said.
        """
        sums = self._with_lone_parts()
        if sums.information == 0:
            return 1.0
        departure = -sums.departures / sums.information
        freedom = sums.errors**2 / sums.errors_squared if sums.errors_squared > 0 else math.inf
        allowed = float(stdtrit(freedom, _CONFIDENCE))
        doubt = allowed * math.sqrt(sums.errors) / sums.information
        return 1 + math.copysign(max(0.0, abs(departure) - doubt), departure)

    def _with_lone_parts(self) -> Self:
        """Their error is how far their coefficients are from that of all; without them where they are too few."""
        freedom = self.lone**2 / self.lone_squared if self.lone_squared > 0 else 0.0
        if freedom < _LEAST_FREEDOM:
            return self
        information, departures = self.information + self.lone, self.departures + self.lone_departures
        slope = departures / information
        squares = self.lone_departures_squared - 2 * slope * self.lone_products + slope**2 * self.lone_squared
        errors = max(0.0, squares) * freedom / (freedom - 1)
        return type(self)(information, departures, self.errors + errors, self.errors_squared + errors**2 / freedom)
