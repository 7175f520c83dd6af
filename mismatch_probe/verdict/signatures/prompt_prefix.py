"""Different text before the response: BOS or a template on one side, another prompt, padding attended to.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills. A first token that is
there twice changes nothing at the first place, since both copies say the same, and shows from the second on.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.context import CLEAN_FIRST, ContextProfile, context_profile
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.positions import FADED, GRADUAL, LARGER_LATER, LATE
from mismatch_probe.verdict.signatures.profile import profile_along

MOST_SLOPE = 0.1
"""Of log deviation against log place over the prompts' starts, where these are compared with the responses."""

STEEP_SLOPE = -0.5
"""A slope that only other text was seen to give."""

AT_ONCE = 0.6
"""Least size at the second and third place, over that of the prompts' starts, of text that spares the first place. It
does not grow, and need not fade: of models that attend to the first token much, one that is there twice gave responses
0.74 (SmolLM2) and 1.04 (Gemma 3) times the starts."""


def prompt_prefix(disagreement: Disagreement) -> Cause | None:
    """The cause where the deviation is there from the start of the context and fades along it."""
    if not disagreement.settled or disagreement.is_rounding:
        return None
    context = context_profile(disagreement)
    what = "the deviation is largest at its start and decays"
    if context is not None:
        if not _is_of_text(context):
            return None
        if context.at_first <= CLEAN_FIRST:
            what = "they agree at the first place of the context and part behind it, as where its first token is twice"
        evidence = (
            f"deviation for equal uncertainty goes as {context.along} over the prompts' starts; the responses have "
            f"{context.later:.2g} times that, and at their ends {context.last:.2g} times that of their beginnings"
        )
    else:
        profile = profile_along(disagreement)
        if profile is None or not profile.surely_below(STEEP_SLOPE):
            return None
        evidence = f"deviation for equal uncertainty falls as {profile}"
    return Code.PROMPT_PREFIX.cause(
        evidence=[evidence],
        advice=[
            "Compare the token ids both sides read, from the first: BOS once, the same template and system prompt, and "
            "nothing stripped between prompt and response."
        ],
        what=what,
    )


def _is_of_text(context: ContextProfile) -> bool:
    if context.at_first <= CLEAN_FIRST:
        at_once = context.spares_first and context.early > AT_ONCE and context.later < LARGER_LATER
        fades = context.early >= GRADUAL and context.later < FADED
        return context.first_place <= LATE and (fades or at_once)
    to_responses = context.later < FADED and context.along.slope < MOST_SLOPE
    return to_responses or context.last < FADED or (context.along.slope < STEEP_SLOPE and context.later < 1)
