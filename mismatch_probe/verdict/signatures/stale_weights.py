"""Different weights on the two sides: a missed or partial sync, another checkpoint, an adapter merged on one side only.

Every token of every response deviates, from the first place of the context on, evenly along it, and both sides
normalise over the whole vocabulary. What is left when rounding, sampling, labels, prompts and positions are ruled out.
"""

import numpy as np

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square
from mismatch_probe.verdict.signatures.positions import LEAST_SLOPE
from mismatch_probe.verdict.signatures.profile import profile_along
from mismatch_probe.verdict.wording import percent, scientific

BROAD = 0.8
"""Least share of tokens that deviate by more than rounding, in all and (less one fifth) in each response."""

FIRST_PLACE = 8
"""The start of the context must be seen: further on, positions and prompts look like weights."""


def stale_weights(found: Disagreement) -> Cause | None:
    """The cause where the deviation is everywhere and has no shape."""
    if not found.settled or found.is_rounding:
        return None
    where = found.along
    beyond = where.pair.abs_diff > 3 * where.floor
    in_each = where.pair.sequences.sum_by_sequence(beyond) / where.pair.sequences.lengths
    if beyond.mean() < BROAD or np.quantile(in_each, 0.02) < BROAD - 0.2 or where.places.min() > FIRST_PLACE:
        return None
    profile = profile_along(where, where.pair.diff)
    if profile is None or abs(profile.slope) > LEAST_SLOPE:
        return None
    return Code.STALE_WEIGHTS.cause(
        size=scientific(root_mean_square(found.pair.diff)),
        evidence=[
            f"{percent(float(beyond.mean()))} of tokens deviate by more than rounding, in every response alike",
            f"the deviation is even along the context: place^{profile.slope:.2f} (standard error {profile.error:.2f})",
        ],
        advice=[
            "Compare the weights of both sides: push them again, merge adapters on both, reload tied embeddings, and "
            "reset the prefix cache after each sync."
        ],
    )
