"""Positions treated differently: RoPE base or scaling, position ids, sliding window, padding, rounded RoPE frequencies.

The first token attends to itself alone, whatever the positions are, and differences of rotation grow with distance. So
the sides agree at the start of the context and part with the place in it, at once where a window ends. Different
weights and different text show at the start already.
"""

from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import profile_along, share_at_start
from mismatch_probe.verdict.wording import percent

CLEAN_START = 0.1
"""Most tokens that may deviate at the first place of the context, where positions cannot matter."""

BROAD = 0.3
"""Least share of the response's uncertain tokens that must deviate then."""

LEAST_SLOPE = 0.2
ERRORS = 4.0
"""Where the start was not recorded: the growth of log deviation with log place, beyond so many standard errors."""

WINDOW = 8
FAR_BEYOND = 10.0
ADVICE = [
    "Compare RoPE base, RoPE scaling, sliding window and position ids of both sides, and in what format the RoPE "
    "frequencies are held; left-padded batches need position ids that start at each row's first token."
]


def positions(found: Disagreement) -> Cause | None:
    """The cause where the sides agree at the start of the context and part with the place in it."""
    if not found.settled or found.is_rounding or found.beyond(3)[found.uncertain].mean() < BROAD:
        return None
    at_start, profile = share_at_start(found), profile_along(found)
    if at_start is None:
        if profile is None or profile.slope - ERRORS * profile.error < LEAST_SLOPE:
            return None
        evidence = [f"deviation for equal uncertainty grows as {profile}"]
    elif at_start > CLEAN_START:
        return None
    else:
        evidence = [f"{percent(at_start)} of tokens deviate by more than rounding at the first place of the context"]
    first = _first_place_beyond(found)
    what = (
        f"they agree up to about token {first} of the context and disagree beyond"
        if first > WINDOW
        else "they agree at the start of the context and part with the place in it"
    )
    return Code.POSITIONS.cause(evidence, ADVICE, what=what)


def _first_place_beyond(found: Disagreement) -> int:
    """The first place in the context where a token deviates far beyond rounding."""
    parts = [found] if found.probe is None else [found.probe, found]
    places = [part.places[part.beyond(FAR_BEYOND) & part.uncertain] for part in parts]
    return int(min((some.min() for some in places if some.size), default=0))
