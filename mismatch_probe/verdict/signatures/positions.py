"""Positions treated differently: RoPE base or scaling, position ids, sliding window, padding, rounded RoPE frequencies.

The first token attends to itself alone, whatever the positions are; differences of rotation grow with distance. So the
sides agree at the start of the context and part with the place in it, at once where a window ends.
"""

import numpy as np

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import Profile, profile_along

LEAST_SLOPE = 0.2
"""Of log deviation against log place, beyond its error; independent errors of the weights are flat within 0.1."""

ERRORS = 4.0

LEAST_GROWTH = 1.5
"""Deviation in the last third of the places over the first third."""

ADVICE = [
    "Compare RoPE base, RoPE scaling, sliding window and position ids of both sides, and in what format the RoPE "
    "frequencies are held; left-padded batches need position ids that start at each row's first token."
]


def positions(found: Disagreement) -> Cause | None:
    """The cause where the deviation starts from rounding, or grows steadily with the place in the context."""
    if not found.settled or found.is_rounding:
        return None
    where = found.along
    start = _starts_late(where)
    if start is not None:
        return Code.POSITIONS.cause(
            what=f"they agree up to about token {start} of the context and disagree beyond",
            evidence=[f"no token before place {start} deviates by more than rounding"],
            advice=ADVICE,
        )
    profile = profile_along(where, where.pair.diff)
    if profile is None or not _grows(profile):
        return None
    return Code.POSITIONS.cause(
        what="the deviation grows with the place in the context",
        evidence=[
            f"deviation for equal uncertainty grows as place^{profile.slope:.2f} (standard error {profile.error:.2f}), "
            f"{profile.tail_over_head:.1f}-fold from the first to the last third"
        ],
        advice=ADVICE,
    )


def _grows(profile: Profile) -> bool:
    return profile.slope - ERRORS * profile.error > LEAST_SLOPE and profile.tail_over_head > LEAST_GROWTH


def _starts_late(where: Disagreement) -> int | None:
    """The place up to which every token agrees to rounding, where most beyond it do not; None without such a place."""
    order = np.argsort(where.places, kind="stable")
    beyond = where.pair.abs_diff[order] > 8 * where.floor
    if beyond.mean() < 0.2:
        return None
    first = int(np.argmax(beyond))
    start = where.places[order][first]
    before = where.places < start
    late = where.places >= 2 * start
    if before.sum() < 20 or before.mean() < 0.02 or not late.any():
        return None
    return int(start) if np.mean(where.pair.abs_diff[late] > 8 * where.floor) > 0.5 else None
