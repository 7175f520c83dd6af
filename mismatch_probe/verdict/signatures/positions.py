"""Positions treated differently: RoPE base or scaling, position ids, sliding window, left padding.

The first token attends to itself alone, whatever the positions are, and differences of rotation grow with distance. So
the sides agree at the start of the context and part with the place in it, at once where a window ends.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.context import CLEAN_FIRST, ContextProfile, context_profile
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import profile_along

BROAD = 0.3
"""Least share of the responses' uncertain tokens that must deviate."""

LATE = 8
"""A deviation that sets in behind this place has a place where it sets in."""

SMALL_EARLY, LARGER_LATER = 0.4, 1.2
"""Sizes over that of the prompts' starts. Changes of rotation gave 0.01 to 0.33 early; later 1.4 to 17 on small models
and 0.9 to 1.7 on SmolLM2, whose prompts are longer than what the rotation takes to be off altogether."""

GRADUAL = 0.1
"""Size at the second and third place over that of the starts below which the deviation sets in with distance alone, so
that it is no text, however it goes on: text gave 0.1 at least, small changes of rotation 0.02."""

FADED = 0.65
"""Size later in the context over that before, from the prompts' starts to the responses or along the responses: other
text gave 0.1 to 0.6 on small models by one or the other, weights 0.7 to 3 by both."""

LEAST_SLOPE = 0.5
"""Of log deviation against log place, where the prompts' starts were not recorded."""

ADVICE = [
    "Compare RoPE base, RoPE scaling, sliding window and position ids of both sides; left-padded batches need a mask "
    "and position ids that start at each row's first token."
]


def positions(disagreement: Disagreement) -> Cause | None:
    """The cause where the sides agree at the start of the context and part with the place in it."""
    if not disagreement.settled or disagreement.is_rounding or disagreement.breadth < BROAD:
        return None
    context = context_profile(disagreement)
    if context is None:
        profile = profile_along(disagreement)
        if profile is None or not profile.surely_above(LEAST_SLOPE):
            return None
        return _cause("part with the place in the context", f"deviation for equal uncertainty grows as {profile}")
    if context.at_first > CLEAN_FIRST:
        return None
    if context.first_place > LATE:
        return _cause(
            f"agree up to about token {context.first_place} of the context and disagree beyond",
            f"no token before place {context.first_place} of the context deviates far beyond rounding",
        )
    if context.early > SMALL_EARLY or context.later < _least_later(context):
        return None
    return _cause(
        "agree at the first place of the context and part with the place in it",
        f"deviation for equal uncertainty, over that of the prompts' first tokens: {context.early:.2g} at the second "
        f"and third place, {context.later:.2g} in the responses",
    )


def _least_later(context: ContextProfile) -> float:
    if not context.spares_first:
        return LARGER_LATER
    return FADED if context.early >= GRADUAL else 0.0


def _cause(what: str, evidence: str) -> Cause:
    return Code.POSITIONS.cause([evidence], ADVICE, what=f"they {what}")
