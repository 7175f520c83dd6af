"""How far two right sides may lie apart by rounding alone, from what this run measured of itself."""

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import TokenPair, difference
from mismatch_probe.verdict.signatures.disagreement import ULP, Disagreement, root_mean_square

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

ONE_SIDE_TOO_FAR = 16.0
"""Errors of both sides, each in units of its format: neighbouring formats differ by 8, right sides by less than 4."""

LEAST_ROUNDING = 0.25
"""In units of the format, an error of the uncertain tokens that a chain of roundings cannot stay below."""


def rounding_floor(pair: TokenPair, train: Dtype, infer: Dtype) -> float:
    """rms of d (nats) that rounding in these formats gives, from the side that errs less in units of its own format.

    Without a reference, from the engine's decode against its prefill; 0 where neither was recorded, which makes every
    test ask for more.
    """
    spacings = np.hypot(ULP[train], ULP[infer])
    if pair.log_ref is not None:
        errors = [
            root_mean_square(difference(leg, pair.log_ref)) / ULP[dtype]
            for leg, dtype in ((pair.log_pi, train), (pair.log_mu, infer))
        ]
        floor = min(errors) * spacings
    elif pair.log_mu_prefill is not None:
        floor = root_mean_square(difference(pair.log_mu, pair.log_mu_prefill)) / ULP[infer] * spacings / np.sqrt(2)
    else:
        floor = 0.0
    if is_exact(train, infer):
        return float(np.clip(floor, LEAST_FP32_FLOOR, MOST_FP32_FLOOR))
    return float(max(floor, LEAST_FP32_FLOOR))


def is_exact(train: Dtype, infer: Dtype) -> bool:
    """Both sides compute in FP32 or better, so a gap between them is a bug."""
    return {train, infer} <= {"fp32", "fp64"}


def exact_pair_agrees(found: Disagreement) -> bool:
    """Whether FP32 against FP32 agrees as two right implementations do."""
    deviation = found.pair.abs_diff
    spikes = float(np.mean(deviation > SPIKE_NATS))
    if spikes > (SPIKES_OF_ROUTING if found.has_experts else 0.0):
        return False
    usual = deviation[deviation <= SPIKE_NATS]
    return bool(usual.mean() <= max(FP32_AGREES_NATS, FP32_AGREES_FLOORS * found.floor))


def one_side_is_off(found: Disagreement) -> bool:
    """Whether one side errs by far more than any format explains, by the measure of the other; without an FP32 pair.

    The other side must err as its own format does: a side that errs less would make rounding look like a fault.
    """
    if found.errors is None:
        return False
    errors = [
        error / ULP[dtype] for error, dtype in zip(found.errors, (found.train_dtype, found.infer_dtype), strict=True)
    ]
    return min(errors) > LEAST_ROUNDING and max(errors) > ONE_SIDE_TOO_FAR * min(errors)
