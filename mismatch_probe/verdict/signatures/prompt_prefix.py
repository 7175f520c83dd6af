"""Different text before the response: BOS or a template on one side, another prompt, padding attended to.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.positions import CLEAN_START
from mismatch_probe.verdict.signatures.profile import profile_along, share_at_start

FADES = -0.1
"""Slope of log deviation against log place: text before the prompt gave -0.2 to -1.4 on small models."""


def prompt_prefix(found: Disagreement) -> Cause | None:
    """The cause where the deviation is there from the start of the context and fades along it."""
    if not found.settled or found.is_rounding:
        return None
    at_start = share_at_start(found)
    if at_start is not None and at_start <= CLEAN_START:
        return None
    profile = profile_along(found if found.probe is None else found.probe)
    if profile is None or not profile.surely_below(FADES):
        return None
    return Code.PROMPT_PREFIX.cause(
        evidence=[f"deviation for equal uncertainty falls as {profile}"],
        advice=[
            "Compare the token ids both sides read, from the first: BOS once, the same template and system prompt, and "
            "nothing stripped between prompt and response."
        ],
    )
