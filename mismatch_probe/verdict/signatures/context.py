"""Where in the context a deviation sets in and how it goes on, from the prompts' first tokens and the responses.

At the first place the model sees one token, which attends to itself: positions, masks and caches cannot matter there,
and text before it matters most.
"""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Mask
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.profile import Profile, profile_along

FAR_BEYOND = 10.0
"""Times rounding: nothing that rounding does to one token in ten reaches it."""

LEAST_STARTS = 8
LEAST_SPAN = 4.0
EARLY = (2, 3)


@dataclass(frozen=True)
class ContextProfile:
    """The course of a deviation, in sizes for equal uncertainty (geometric means over uncertain tokens).

    at_first: share of the prompts whose first predicted token deviates far beyond rounding. early: size at the second
    and third place over that of the prompts' starts. later: size in the responses over that of the starts. last: size
    in the last quarter of the responses' places over that in the first, 1 where these are close together. along: the
    profile over the starts. first_place: the first place of the context that deviates far beyond rounding.
    """

    at_first: float
    early: float
    later: float
    last: float
    along: Profile
    first_place: int


def context_profile(disagreement: Disagreement) -> ContextProfile | None:
    """The course, None where the prompts' starts were not recorded, are too few, too short or too certain."""
    start = disagreement.prompt_start
    if start is None:
        return None
    along = profile_along(start)
    first = (start.places == 1) & start.uncertain
    early = (start.places >= EARLY[0]) & (start.places <= EARLY[1]) & start.uncertain
    if along is None or first.sum() < LEAST_STARTS or not early.any() or not disagreement.uncertain.any():
        return None
    level = float(along.levels.mean())
    far = [part.places[part.beyond(FAR_BEYOND) & part.uncertain] for part in (start, disagreement)]
    return ContextProfile(
        at_first=float(start.beyond(FAR_BEYOND)[first].mean()),
        early=_size(start, early) / level,
        later=_size(disagreement, disagreement.uncertain) / level,
        last=_last_over_first(disagreement),
        along=along,
        first_place=int(min((places.min() for places in far if places.size), default=0)),
    )


def _size(disagreement: Disagreement, chosen: Mask) -> float:
    return float(np.exp(np.log(disagreement.logit_errors[chosen]).mean()))


def _last_over_first(disagreement: Disagreement) -> float:
    places = disagreement.places[disagreement.uncertain]
    if places.max() < LEAST_SPAN * places.min():
        return 1.0
    low, high = np.quantile(places, (0.25, 0.75))
    return _size(disagreement, disagreement.uncertain & (disagreement.places >= high)) / _size(
        disagreement, disagreement.uncertain & (disagreement.places <= low)
    )
