"""Different text before the response: BOS or a template on one side, another prompt, padding attended to.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills. A first token that is
there twice changes nothing at the first place, since both copies say the same, and fades from the second on.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.context import ContextProfile, context_profile
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.positions import CLEAN_FIRST, LATE
from mismatch_probe.verdict.signatures.profile import profile_along

FADED = 0.65
"""Size later in the context over that before, from the prompts' starts to the responses or along the responses: other
text gave 0.1 to 0.6 on small models by one or the other, weights 0.7 to 3 by both."""

MOST_SLOPE = 0.1
"""Of log deviation against log place over the prompts' starts, where these are compared with the responses."""

STEEP_SLOPE = -0.5
"""A slope that only other text was seen to give."""

AT_ONCE, SMALLER = 0.6, 0.9
"""Sizes over that of the prompts' starts, at the second and third place and in the responses, of what spares the first
place alone. A first token twice gave 1.1 and 0.8 on SmolLM2, where it hardly fades; rotations 0.16 to 0.37 early."""


def prompt_prefix(disagreement: Disagreement) -> Cause | None:
    """The cause where the deviation is there from the start of the context and fades along it."""
    if not disagreement.settled or disagreement.is_rounding:
        return None
    context = context_profile(disagreement)
    if context is not None:
        if not _is_of_text(context):
            return None
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
    )


def _is_of_text(context: ContextProfile) -> bool:
    if context.at_first <= CLEAN_FIRST:
        at_once = context.early > AT_ONCE and context.later < SMALLER
        return context.first_place <= LATE and (context.later < FADED or at_once)
    to_responses = context.later < FADED and context.along.slope < MOST_SLOPE
    return to_responses or context.last < FADED or (context.along.slope < STEEP_SLOPE and context.later < 1)
