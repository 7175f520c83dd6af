"""The ratio of two temperatures, fitted to deviations by least squares.

Dividing logits by T turns p into p^(1/T) / Z, so log mu = b log pi - log Z with b = T_pi / T_mu and a Z that is the
same for every token of one context. To second order in b - 1, log Z = -(b - 1) H + (b - 1)^2 V / 2 with pi's entropy H
and the variance V of its log-probs (the cumulant generating function of log pi). So d = (1 - b) (log pi + H) + (a
function of the context that vanishes with H): linear in the token's own log-prob within a context, which no rounding,
prompt or weight error is.
"""

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints, Reals

_LEAST_FREE = 1e-6


def temperature_columns(log_pi: Reals, entropy: Floats) -> Floats:
    """What d is linear in [T, 3]: the token's surprise log pi + H, whose coefficient is 1 - b, and H and H^2."""
    return np.column_stack([log_pi + entropy, entropy, entropy**2])


class LeastSquares:
    """`values` [T] by `columns` [T, C], without an intercept: coefficients [C] and fitted values [T]."""

    def __init__(self, columns: Floats, values: Floats) -> None:
        self._columns, self.values = columns, values
        self._solver = np.linalg.pinv(columns)
        self.coefficients: Floats = self._solver @ values
        self.fitted: Floats = columns @ self.coefficients

    def first_information(self) -> float:
        """Sum of squares of the first column that the others leave; 0 where they leave none of it."""
        square = float(self._solver[0] @ self._solver[0])
        return 1 / square if square > 0 else 0.0

    def first_error(self, clusters: Ints) -> tuple[float, float]:
        """The first coefficient's standard error and its degrees of freedom, where values of one of the `clusters` [T]
        may err alike.

        A jackknife: how far the coefficient moves as each cluster is left out of the fit (CR3) [Bell & McCaffrey 2002,
        Survey Methodology 28]. The freedom is that of a sum of squares with the clusters' weights [Satterthwaite 1946,
        Biometrics 2]: little where the coefficient hangs on a few of them.
        """
        numbers = np.unique(clusters, return_inverse=True)[1]
        basis, scales, turned = np.linalg.svd(self._columns, full_matrices=False)
        kept = scales > _LEAST_FREE * scales.max(initial=0.0)
        basis, first = basis[:, kept], turned[kept, 0] / scales[kept]
        left = np.eye(kept.sum()) - _by_cluster(numbers, basis[:, :, None] * basis[:, None, :])
        freed, axes = np.linalg.eigh(left)
        pulls = _by_cluster(numbers, basis * (self.values - self.fitted)[:, None])
        turned_pulls = np.einsum("gca,gc->ga", axes, pulls) / np.maximum(freed, _LEAST_FREE)
        moved = np.einsum("c,gca,ga->g", first, axes, turned_pulls)
        shares = _by_cluster(numbers, self._solver[0] ** 2)
        freedom = float(shares.sum() ** 2 / (shares @ shares)) if shares.any() else 0.0
        return float(np.linalg.norm(moved)), freedom


def _by_cluster(numbers: Ints, values: Floats) -> Floats:
    """Sums over the values of each cluster: [T, ...] -> [G, ...]."""
    sums: Floats = np.zeros((int(numbers.max()) + 1, *values.shape[1:]))
    np.add.at(sums, numbers, values)
    return sums
