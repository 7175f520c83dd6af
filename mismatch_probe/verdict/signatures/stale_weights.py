"""Different weights on the two sides: a missed or partial sync, another checkpoint, an adapter merged on one side only.

Every token of every response deviates, from the first place of the context on, where neither positions nor caches have
a say, and without the decay of different text. What is left when rounding, sampling, labels, prompts and positions are
ruled out.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import profile_along, share_at_start
from mismatch_probe.verdict.wording import percent, scientific

BROAD = 0.8
"""Least share of uncertain tokens that deviate by more than rounding, in all and at the start of the context."""

MOST_SLOPE = 0.6
LEAST_SLOPE = -0.1
"""Of log deviation against log place: weights give 0 to 0.4 on small models, text before the response below -0.2."""


def stale_weights(found: Disagreement) -> Cause | None:
    """The cause where the deviation is everywhere; None where the start of the context was not recorded."""
    if not found.settled or found.is_rounding:
        return None
    at_start, profile = share_at_start(found), profile_along(found)
    everywhere = float(found.beyond(3)[found.uncertain].mean())
    if at_start is None or profile is None or min(at_start, everywhere) < BROAD:
        return None
    if not LEAST_SLOPE < profile.slope < MOST_SLOPE:
        return None
    return Code.STALE_WEIGHTS.cause(
        size=scientific(found.rms),
        evidence=[
            f"{percent(everywhere)} of uncertain tokens deviate by more than rounding, "
            f"{percent(at_start)} at the first place of the context",
            f"deviation for equal uncertainty goes as {profile}: neither text before it nor positions",
        ],
        advice=[
            "Compare the weights of both sides: push them again, merge adapters on both, reload tied embeddings, and "
            "reset the prefix cache after each sync."
        ],
    )
