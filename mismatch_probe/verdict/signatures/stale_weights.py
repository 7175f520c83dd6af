"""Different weights on the two sides: a missed or partial sync, another checkpoint, an adapter merged on one side only.

Every token of every response deviates, from the first place of the context on, where neither positions nor caches have
a say, and without the decay of different text. What is left when rounding, sampling, labels, prompts and positions are
ruled out.
"""

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import profile_along, share_at_start

BROAD = 0.8
"""Least share of uncertain tokens that deviate by more than rounding, in all and at the start of the context."""

SLOPES = (-0.1, 0.7)
"""Of log deviation against log place at the start of the context: weights gave -0.05 to 0.6 on small models."""

RESPONSE_OVER_START = (0.3, 4.0)
"""Level of the response's deviation over that of the prompts' starts, for equal uncertainty."""


def stale_weights(found: Disagreement) -> Cause | None:
    """The cause where the deviation is everywhere; None where the start of the context was not recorded."""
    if not found.settled or found.is_rounding:
        return None
    at_start = share_at_start(found)
    profile = None if found.probe is None else profile_along(found.probe)
    everywhere = float(found.beyond(3)[found.uncertain].mean())
    if at_start is None or profile is None or min(at_start, everywhere) < BROAD:
        return None
    response = float(found.pair.abs_diff.mean() / found.sensitivity.mean())
    alike = RESPONSE_OVER_START[0] < response / profile.level < RESPONSE_OVER_START[1]
    if not alike or not SLOPES[0] < profile.slope < SLOPES[1]:
        return None
    return Code.STALE_WEIGHTS.cause(
        size=write_number(found.rms),
        evidence=[
            f"{write_percent(everywhere)} of uncertain tokens deviate by more than rounding, "
            f"{write_percent(at_start)} at the first place of the context",
            f"deviation for equal uncertainty goes as {profile} at the start, and the response's is "
            f"{response / profile.level:.1f} times the start's: neither other text nor positions",
        ],
        advice=[
            "Compare the weights of both sides: push them again, merge adapters on both, reload tied embeddings, and "
            "reset the prefix cache after each sync."
        ],
    )
