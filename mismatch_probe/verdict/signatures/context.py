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
LIKELIHOODS = (1e-3, 0.02, 0.15, 0.4)
"""Bounds of the probabilities between which tokens are taken for about as likely."""
EARLY = (2, 3)


@dataclass(frozen=True)
class ContextProfile:
    """The course of a deviation, in sizes for equal uncertainty (geometric means over uncertain tokens).

    at_first: share of the prompts whose first predicted token deviates far beyond rounding. early: size at the second
    and third place over that of the prompts' starts. later: size in the responses over that of tokens of the starts
    that are about as likely. last: size in the last quarter of the responses' places over that in the first, 1 where
    these are close together. along: the profile over the starts. first_place: the first place of the context that
    deviates far beyond rounding.
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
        later=_over_starts(start, disagreement),
        last=_last_over_first(disagreement),
        along=along,
        first_place=int(min((places.min() for places in far if places.size), default=0)),
    )


def _size(disagreement: Disagreement, chosen: Mask) -> float:
    return float(np.exp(np.log(disagreement.logit_errors[chosen]).mean()))


def _over_starts(start: Disagreement, disagreement: Disagreement) -> float:
    """Size in the responses over that of prompt tokens that mu takes for about as likely.

    Real prompts hold many tokens that their model would never sample (a third below p = 1e-3 on SmolLM2, a tenth of its
    responses), and whatever moves the logits moves those most: other weights 2.5 times as much, a temperature 8 times.
    """
    levels = [np.digitize(part.pair.prob_mu, LIKELIHOODS) for part in (start, disagreement)]
    log_ratio, counted = 0.0, 0
    for level in range(len(LIKELIHOODS) + 1):
        of_start, of_responses = (
            part.uncertain & (found == level) for part, found in zip((start, disagreement), levels, strict=True)
        )
        if of_start.sum() >= LEAST_STARTS and (count := int(of_responses.sum())):
            log_ratio += count * float(np.log(_size(disagreement, of_responses) / _size(start, of_start)))
            counted += count
    if not counted:
        return _size(disagreement, disagreement.uncertain) / _size(start, start.uncertain)
    return float(np.exp(log_ratio / counted))


def _last_over_first(disagreement: Disagreement) -> float:
    places = disagreement.places[disagreement.uncertain]
    if places.max() < LEAST_SPAN * places.min():
        return 1.0
    low, high = np.quantile(places, (0.25, 0.75))
    return _size(disagreement, disagreement.uncertain & (disagreement.places >= high)) / _size(
        disagreement, disagreement.uncertain & (disagreement.places <= low)
    )
