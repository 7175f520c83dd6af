"""Positions treated differently: RoPE base or scaling, position ids, sliding window, left padding.

The first token attends to itself alone, whatever the positions are, and differences of rotation grow with distance. So
the sides agree at the start of the context and part with the place in it, at once where a window ends.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.context import context_profile
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import profile_along

CLEAN_FIRST = 0.1
"""Most prompts that may deviate at the first place of the context."""

BROAD = 0.3
"""Least share of the responses' uncertain tokens that must deviate."""

LATE = 8
"""A deviation that sets in behind this place has a place where it sets in."""

SMALL_EARLY, LARGER_LATER = 0.4, 1.2
"""Sizes over that of the prompts' starts. Changes of rotation gave 0.01 to 0.2 early and 1.4 to 17 later on small
models, 0.2 to 0.37 and 1.3 to 1.9 on SmolLM2; a first token that is there twice, which spares the first place too, gave
0.1 to 2 and 0.2 to 1.6, and 1.1 and 0.8."""

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
    if context.early > SMALL_EARLY or context.later < LARGER_LATER:
        return None
    return _cause(
        "agree at the first place of the context and part with the place in it",
        f"deviation for equal uncertainty, over that of the prompts' first tokens: {context.early:.2g} at the second "
        f"and third place, {context.later:.2g} in the responses",
    )


def _cause(what: str, evidence: str) -> Cause:
    return Code.POSITIONS.cause([evidence], ADVICE, what=f"they {what}")
