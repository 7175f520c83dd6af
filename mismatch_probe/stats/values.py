"""The metrics of a pair without their intervals, which take longer than the values themselves."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Function, Scale
from mismatch_probe.stats.metrics import metrics_of
from mismatch_probe.stats.results import Estimate, Unit
from mismatch_probe.stats.sequences import Floats, Mask, TokenPair


class ValueEstimator(Estimator):
    """Makes the values of `Estimator`, bit for bit, all of them bare."""

    def smooth(
        self, function: Function, columns: Sequence[Floats], by: Unit, scale: Scale = Scale.SIGNED
    ) -> Estimate | None:
        with np.errstate(all="ignore"):
            value = float(function(*np.stack(columns).sum(axis=1, keepdims=True))[0])
        return self.bare(value, by) if np.isfinite(value) else None

    def share(self, mask: Mask, by: Unit) -> Estimate:
        return self.bare(float(np.mean(mask)), by)

    def share_of_totals(self, events: Floats, units: Floats, by: Unit) -> Estimate:
        return self.bare(float(events.sum() / units.sum()), by)


def metric_values(pair: TokenPair) -> dict[str, float]:
    """Those of `pair_metrics` that can be had."""
    estimates, _ = metrics_of(pair, ValueEstimator(pair.sequences))
    return {name: estimate.value for name, estimate in estimates.items()}
