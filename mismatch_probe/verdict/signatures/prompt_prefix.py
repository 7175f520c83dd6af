"""Different text before the response: BOS twice or missing, another chat template, another prompt.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.positions import ERRORS, LEAST_GROWTH, LEAST_SLOPE
from mismatch_probe.verdict.signatures.profile import profile_along


def prompt_prefix(found: Disagreement) -> Cause | None:
    """The cause where the deviation is largest at the start and decays."""
    if not found.settled or found.is_rounding:
        return None
    where = found.along
    profile = profile_along(where, where.pair.diff)
    if (
        profile is None
        or profile.slope + ERRORS * profile.error > -LEAST_SLOPE
        or profile.tail_over_head > 1 / LEAST_GROWTH
    ):
        return None
    return Code.PROMPT_PREFIX.cause(
        evidence=[
            f"deviation for equal uncertainty falls as place^{profile.slope:.2f} (standard error {profile.error:.2f}), "
            f"to {profile.tail_over_head:.2f} of its start in the last third"
        ],
        advice=[
            "Compare the token ids both sides read, from the first: BOS once, the same template and system prompt, "
            "and nothing stripped between prompt and response."
        ],
    )
