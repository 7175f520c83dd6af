"""How far two right sides may lie apart by rounding alone, from what this run measured of itself."""

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import TokenPair, difference
from mismatch_probe.verdict.signatures.profile import Disagreement, root_mean_square

LEAST_FP32_FLOOR = 1e-6
"""Nats: log-probs of magnitude 8 are stored in FP32 to 5e-7."""

MOST_FP32_FLOOR = 2e-5
"""Nats: two passes further apart than this in FP32 are no FP32 (TF32), or no repetition."""

FP32_AGREES_NATS = 1e-4
"""FP32 against FP32 differs by accumulation order alone: mean abs(d) of 2e-6 nats across engines on small models.
Fifty times that leaves room for deep models, whose measured floor raises the bound; a bug that matters moves the mean
far past it.
"""

FP32_AGREES_FLOORS = 30.0

SPIKE_NATS = 0.05
"""One token this far off in FP32 is no rounding, which reaches 1e-3 nats on the least likely tokens."""

SPIKES_OF_ROUTING = 1e-3
"""Share of spikes that near ties between experts may cause even in FP32."""


def rounding_floor(pair: TokenPair, train: Dtype, infer: Dtype) -> float:
    """rms of d (nats) that rounding in these formats gives, from the side that errs less in units of its own format.

    Without a reference, from the engine's decode against its prefill; 0 where neither was recorded, which makes every
    test ask for more.
    """
    spacings = np.hypot(train.round_off, infer.round_off)
    if pair.log_ref is not None:
        errors = [
            root_mean_square(difference(leg, pair.log_ref)) / dtype.round_off
            for leg, dtype in ((pair.log_pi, train), (pair.log_mu, infer))
        ]
        floor = min(errors) * spacings
    elif pair.log_mu_prefill is not None:
        floor = root_mean_square(difference(pair.log_mu, pair.log_mu_prefill)) / infer.round_off * spacings / np.sqrt(2)
    else:
        floor = 0.0
    if not (train.is_16_bit or infer.is_16_bit):
        return float(np.clip(floor, LEAST_FP32_FLOOR, MOST_FP32_FLOOR))
    return float(max(floor, LEAST_FP32_FLOOR))


def exact_pair_agrees(disagreement: Disagreement) -> bool:
    """Whether FP32 against FP32 agrees as two right implementations do."""
    deviation = disagreement.pair.abs_diff
    spikes = float(np.mean(deviation > SPIKE_NATS))
    if spikes > (SPIKES_OF_ROUTING if disagreement.has_experts else 0.0):
        return False
    usual = deviation[deviation <= SPIKE_NATS]
    return bool(usual.mean() <= max(FP32_AGREES_NATS, FP32_AGREES_FLOORS * disagreement.floor))
