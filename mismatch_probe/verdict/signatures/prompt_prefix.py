"""Different text before the response: BOS twice or missing, another chat template, another prompt, padding attended to.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills.
"""

from dataclasses import replace

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.positions import CLEAN_START, ERRORS, LEAST_SLOPE
from mismatch_probe.verdict.signatures.profile import profile_along, share_at_start


def prompt_prefix(found: Disagreement) -> Cause | None:
    """The cause where the deviation decays along the context, and is there from its start."""
    if not found.settled or found.is_rounding:
        return None
    at_start = share_at_start(found)
    if at_start is not None and at_start <= CLEAN_START:
        return None
    for profile in (profile_along(found), profile_along(replace(found, probe=None))):
        if profile is not None and profile.slope + ERRORS * profile.error < -LEAST_SLOPE:
            return Code.PROMPT_PREFIX.cause(
                evidence=[f"deviation for equal uncertainty falls as {profile}"],
                advice=[
                    "Compare the token ids both sides read, from the first: BOS once, the same template and system "
                    "prompt, and nothing stripped between prompt and response."
                ],
            )
    return None
