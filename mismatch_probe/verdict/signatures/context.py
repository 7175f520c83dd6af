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

SPARED = 3e-3
"""Most size at the first place over that at the second and third where nothing but rounding is at the first: rounding
gave 1e-3 at most on four models, other weights 0.017 at least."""

LEAST_STARTS = 8
LEAST_SPAN = 4.0
LIKELIHOODS = (1e-3, 0.02, 0.15, 0.4)
"""Bounds of the probabilities between which tokens are taken for about as likely."""
EARLY = (2, 3)
CLEAN_FIRST = 0.1
"""Most prompts that may deviate at the first place of the context where it is spared."""


@dataclass(frozen=True)
class ContextProfile:
    """The course of a deviation, in sizes for equal uncertainty (geometric means over uncertain tokens).

    at_first: share of the prompts whose first predicted token deviates far beyond rounding. first: size there over that
    at the second and third place. early: size at these over that of the prompts' starts. later: size in the responses
    over that of tokens of the starts that are about as likely. last: size in the last quarter of the responses' places
    over that in the first, 1 where these are close together. along: the profile over the starts. The starts are without
    the first place where that is spared. first_place: the first place of the context that deviates far beyond rounding.
    """

    at_first: float
    first: float
    early: float
    later: float
    last: float
    along: Profile
    first_place: int

    @property
    def spares_first(self) -> bool:
        """Whether the sides agree at the first place to rounding, however large the deviation is behind it."""
        return self.at_first <= CLEAN_FIRST and self.first < SPARED


def context_profile(disagreement: Disagreement) -> ContextProfile | None:
    """The course, None where the prompts' starts were not recorded, are too few, too short or too certain."""
    start = disagreement.prompt_start
    if start is None:
        return None
    first = (start.places == 1) & start.uncertain
    early = (start.places >= EARLY[0]) & (start.places <= EARLY[1]) & start.uncertain
    if first.sum() < LEAST_STARTS or not early.any() or not disagreement.uncertain.any():
        return None
    at_first = float(start.beyond(FAR_BEYOND)[first].mean())
    from_place = EARLY[0] if at_first <= CLEAN_FIRST else 1
    along = profile_along(start, from_place)
    if along is None:
        return None
    far = [part.places[part.beyond(FAR_BEYOND) & part.uncertain] for part in (start, disagreement)]
    return ContextProfile(
        at_first=at_first,
        first=_size(start, first) / _size(start, early),
        early=_size(start, early) / float(along.levels.mean()),
        later=_over_starts(start, start.uncertain & (start.places >= from_place), disagreement),
        last=_last_over_first(disagreement),
        along=along,
        first_place=int(min((places.min() for places in far if places.size), default=0)),
    )


def _size(disagreement: Disagreement, chosen: Mask) -> float:
    return float(np.exp(np.log(disagreement.logit_errors[chosen]).mean()))


def _over_starts(start: Disagreement, chosen: Mask, disagreement: Disagreement) -> float:
    """Size in the responses over that of the chosen prompt tokens that mu takes for about as likely.

    Real prompts hold many tokens that their model would never sample (a third below p = 1e-3 on SmolLM2, a tenth of its
    responses), and whatever moves the logits moves those most: other weights 2.5 times as much, a temperature 8 times.
    """
    levels = [np.digitize(part.pair.prob_mu, LIKELIHOODS) for part in (start, disagreement)]
    log_ratio, counted = 0.0, 0
    for level in range(len(LIKELIHOODS) + 1):
        of_start, of_responses = (
            counts & (found == level) for counts, found in zip((chosen, disagreement.uncertain), levels, strict=True)
        )
        if of_start.sum() >= LEAST_STARTS and (count := int(of_responses.sum())):
            log_ratio += count * float(np.log(_size(disagreement, of_responses) / _size(start, of_start)))
            counted += count
    if not counted:
        return _size(disagreement, disagreement.uncertain) / _size(start, chosen)
    return float(np.exp(log_ratio / counted))


def _last_over_first(disagreement: Disagreement) -> float:
    places = disagreement.places[disagreement.uncertain]
    if places.max() < LEAST_SPAN * places.min():
        return 1.0
    low, high = np.quantile(places, (0.25, 0.75))
    return _size(disagreement, disagreement.uncertain & (disagreement.places >= high)) / _size(
        disagreement, disagreement.uncertain & (disagreement.places <= low)
    )
