"""The ratio of two temperatures, fitted to deviations by least squares.

Dividing logits by T turns p into p^(1/T) / Z, so log mu = b log pi - log Z with b = T_pi / T_mu and a Z that is the
same for every token of one context. To second order in b - 1, log Z = -(b - 1) H + (b - 1)^2 V / 2 with pi's entropy H
and the variance V of its log-probs (the cumulant generating function of log pi). So d = (1 - b) (log pi + H) + (a
function of the context that vanishes with H): linear in the token's own log-prob within a context, which no rounding,
prompt or weight error is.
"""

import numpy as np

from mismatch_probe.stats.sequences import Floats, Reals

_LEAST_FREE = 1e-6


def temperature_columns(log_pi: Reals, entropy: Floats) -> Floats:
    """What d is linear in [T, 3]: the token's surprise log pi + H, whose coefficient is 1 - b, and H and H^2."""
    return np.column_stack([log_pi + entropy, entropy, entropy**2])


class LeastSquares:
    """`values` [T] by `columns` [T, C], without an intercept: coefficients [C] and fitted values [T]."""

    def __init__(self, columns: Floats, values: Floats) -> None:
        self._columns, self._values = columns, values
        self._solver = np.linalg.pinv(columns)
        self.coefficients: Floats = self._solver @ values
        self.fitted: Floats = columns @ self.coefficients

    def first_information(self) -> float:
        """Sum of squares of the first column that the others leave; 0 where they leave none of it."""
        square = float(self._solver[0] @ self._solver[0])
        return 1 / square if square > 0 else 0.0

    def first_error(self) -> float:
        """The first coefficient's standard error, where every value errs on its own scale and one that the fit hangs on
        counts as if it were left out of it (HC3) [MacKinnon & White 1985, J. Econometrics 29].
        """
        leverage = np.einsum("tc,ct->t", self._columns, self._solver)
        left_out = (self._values - self.fitted) / np.maximum(1 - leverage, _LEAST_FREE)
        return float(np.linalg.norm(self._solver[0] * left_out))
