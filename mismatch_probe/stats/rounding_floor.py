"""By how much rounding alone moves a log-prob: the unit in which errors of single tokens are read.

A format's error is far larger on an unlikely token than on a certain one. So it is measured on the same tokens,
computed in the format and in FP32, and averaged over tokens of like probability.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.stats.sequences import Floats, Mask

LEAST_NATS: Final = 1e-5
"""What FP32 sums of a deep model differ by when they are added up in another order."""
_LEAST_MEASURED_NATS: Final = -1.0
_TOKENS_A_BIN: Final = 100
_MOST_BINS: Final = 16
_TRIMMED: Final = 0.01


@dataclass(frozen=True)
class Floor:
    """Root mean square error (nats) of a format at log-probs between `edges` [B - 1].

    least: the mean log-prob of the least likely tokens that were measured. What another hypothesis takes for less
    likely errs in proportion, as its logit is larger.
    """

    edges: Floats
    sizes: Floats
    least: float = -np.inf

    @classmethod
    def measured(cls, errors: Floats, log_probs: Floats, counted: Mask) -> "Floor":
        """From a format's errors at tokens of these log-probs [T]."""
        known = counted & np.isfinite(errors) & np.isfinite(log_probs)
        if not known.any():
            return cls(np.empty(0), np.array([LEAST_NATS]))
        errors, log_probs = errors[known], log_probs[known]
        num_bins = int(np.clip(len(errors) // _TOKENS_A_BIN, 1, _MOST_BINS))
        edges = np.unique(np.quantile(log_probs, np.linspace(0, 1, num_bins + 1)[1:-1]))
        bins = np.searchsorted(edges, log_probs)
        squares = [trimmed_mean(errors[bins == number] ** 2) for number in range(len(edges) + 1)]
        least = float(log_probs[bins == 0].mean())
        return cls(edges, np.sqrt(np.nan_to_num(squares) + LEAST_NATS**2), min(least, _LEAST_MEASURED_NATS))

    def at(self, log_probs: Floats) -> Floats:
        """At these log-probs [T]; what is not finite is taken for the least likely that was measured."""
        finite = np.where(np.isfinite(log_probs), log_probs, self.least)
        beyond = np.maximum(finite / self.least, 1.0) if np.isfinite(self.least) else 1.0
        return np.asarray(self.sizes[np.searchsorted(self.edges, finite)] * beyond)

    def of_format(self, times: float) -> "Floor":
        """Of a format that rounds `times` as far."""
        beyond = np.sqrt(np.maximum(self.sizes**2 - LEAST_NATS**2, 0))
        return replace(self, sizes=np.hypot(beyond * times, LEAST_NATS))


def trimmed_mean(squares: Floats) -> float:
    """The mean without the largest hundredth, which single tokens would decide; NaN of nothing."""
    if not len(squares):
        return float("nan")
    kept = max(1, round(len(squares) * (1 - _TRIMMED)))
    return float(np.partition(squares, kept - 1)[:kept].mean())
