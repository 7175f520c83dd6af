"""Positions treated differently: RoPE base or scaling, position ids, sliding window, left padding.

The first token attends to itself alone, whatever the positions are, and differences of rotation grow with distance. So
the sides agree at the start of the context and part with the place in it, at once where a window ends. Different
weights and different text show at the start already; but a first token that is there twice changes nothing at the
first place either, so without growth or a late start no cause is named.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import FAR_BEYOND, profile_along, share_at_start

CLEAN_START = 0.1
"""Most tokens that may deviate at the first place of the context, where positions cannot matter."""

BROAD = 0.3
"""Least share of the response's uncertain tokens that must deviate then."""

LEAST_SLOPE = 0.55
"""Of log deviation against log place: a doubled first token gave 0.4 on small models, of rotation 0.7 to 1.3."""

LATE = 8
ADVICE = [
    "Compare RoPE base, RoPE scaling, sliding window and position ids of both sides; left-padded batches need a mask "
    "and position ids that start at each row's first token."
]


def positions(found: Disagreement) -> Cause | None:
    """The cause where the sides agree at the start of the context and part with the place in it."""
    if not found.settled or found.is_rounding or found.beyond(3)[found.uncertain].mean() < BROAD:
        return None
    at_start = share_at_start(found)
    if at_start is not None and at_start > CLEAN_START:
        return None
    first = _first_place_beyond(found)
    if first > LATE:
        what = f"they agree up to about token {first} of the context and disagree beyond"
        return Code.POSITIONS.cause(
            [f"no token before place {first} of the context deviates far beyond rounding"], ADVICE, what=what
        )
    profile = profile_along(found if found.probe is None else found.probe)
    if profile is None or not profile.surely_above(LEAST_SLOPE):
        return None
    what = "they part with the place in the context"
    return Code.POSITIONS.cause([f"deviation for equal uncertainty grows as {profile}"], ADVICE, what=what)


def _first_place_beyond(found: Disagreement) -> int:
    """The first place in the context where a token deviates far beyond rounding; 0 where the start was not recorded."""
    if found.probe is None:
        return 0
    places = [part.places[part.beyond(FAR_BEYOND) & part.uncertain] for part in (found.probe, found)]
    return int(min((some.min() for some in places if some.size), default=0))
