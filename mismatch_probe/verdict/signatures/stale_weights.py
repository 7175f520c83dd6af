"""Different weights on the two sides: a missed or partial sync, another checkpoint, an adapter merged on one side only.

Every token of every response deviates, from the first place of the context on, where neither positions nor caches have
a say, and without the fading of different text. What is left when rounding, sampling, labels, prompts and positions
are ruled out.
"""

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.context import context_profile
from mismatch_probe.verdict.signatures.disagreement import Disagreement

BROAD = 0.8
"""Least share of uncertain tokens that deviate by more than rounding, in all and at the first place of the context."""

SLOPES = (-0.4, 1.0)
"""Of log deviation against log place over the prompts' starts: weights gave -0.3 to 0.8 on small models."""

LATER = (0.7, 4.0)
"""Size in the responses over that in the prompts' starts: weights gave 0.8 to 3 on small models, 0.74 to 1 on
SmolLM2."""


def stale_weights(disagreement: Disagreement) -> Cause | None:
    """The cause where the deviation is everywhere; None where the start of the context was not recorded."""
    if not disagreement.settled or disagreement.is_rounding:
        return None
    context = context_profile(disagreement)
    if context is None or min(context.at_first, disagreement.breadth) < BROAD:
        return None
    if not SLOPES[0] < context.along.slope < SLOPES[1] or not LATER[0] < context.later < LATER[1]:
        return None
    if context.last < LATER[0]:
        return None
    return Code.STALE_WEIGHTS.cause(
        size=write_number(disagreement.rms),
        evidence=[
            f"{write_percent(disagreement.breadth)} of uncertain tokens deviate by more than rounding, "
            f"{write_percent(context.at_first)} at the first place of the context",
            f"deviation for equal uncertainty goes as {context.along} over the prompts' starts; the responses have "
            f"{context.later:.2g} times that: neither other text nor positions",
        ],
        advice=[
            "Compare the weights of both sides: push them again, merge adapters on both, reload tied embeddings, and "
            "reset the prefix cache after each sync."
        ],
    )
