"""Causes in the context: other text before the prompt, other positions, blocks whose seams are wrong.

At the first place the model sees one token, which attends to itself: positions, masks and caches cannot matter there,
and text before it matters most.

The first token attends to itself alone, whatever the positions are, and differences of rotation grow with distance. So
the sides agree at the start of the context and part with the place in it, at once where a window ends.

The extra or missing tokens weigh most where little else is in the context, and fade as it fills. A first token that is
there twice changes nothing at the first place, since both copies say the same, and shows from the second on.
"""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Mask
from mismatch_probe.verdict.signatures.profile import SIGNATURES, Disagreement, Profile, profile_along

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
    """The course of a deviation, in sizes for equal uncertainty (geometric means over uncertain tokens)."""

    at_first: float
    """Share of the prompts whose first predicted token deviates far beyond rounding."""
    first: float
    """Size there over that at the second and third place."""
    size_early: float
    """Size at these over that of the prompts' starts."""
    size_later: float
    """Size in the responses over that of tokens of the starts that are about as likely."""
    last: float
    """Size in the last quarter of the responses' places over that in the first, 1 where these are close together."""
    along: Profile
    """The profile over the starts. The starts are without the first place where that is spared."""
    first_place: int
    """The first place of the context that deviates far beyond rounding."""
    num_agreeing: int
    """Prompts of an FP32 pair that agree to rounding in start and responses, where others part at the first place."""

    @property
    def spares_first(self) -> bool:
        """Whether the sides agree at the first place to rounding, however large the deviation is behind it."""
        return self.at_first <= CLEAN_FIRST and self.first < SPARED


def context_profile(disagreement: Disagreement) -> ContextProfile | None:
    """The course, None where the prompts' starts were not recorded, are too few, too short or too certain."""
    start = disagreement.prompt_start
    if start is None:
        return None
    is_first = (start.places == 1) & start.uncertain
    is_early = (start.places >= EARLY[0]) & (start.places <= EARLY[1]) & start.uncertain
    if is_first.sum() < LEAST_STARTS or not is_early.any() or not disagreement.uncertain.any():
        return None
    at_first = float(start.is_beyond(FAR_BEYOND)[is_first].mean())
    from_place = EARLY[0] if at_first <= CLEAN_FIRST else 1
    agreeing: set[int] = set()
    if at_first > CLEAN_FIRST and disagreement.is_exact:
        agreeing = _agreeing_prompts(start) & _agreeing_prompts(disagreement)
    of_start, of_responses = _of_other_prompts(agreeing, start, disagreement)
    is_first, is_early = is_first & of_start, is_early & of_start
    along = profile_along(start, from_place, of_start)
    if along is None or not (is_first.any() and is_early.any()):
        return None
    far_places = [part.places[part.is_beyond(FAR_BEYOND) & part.uncertain] for part in (start, disagreement)]
    return ContextProfile(
        at_first=at_first,
        first=_mean_logit_error(start, is_first) / _mean_logit_error(start, is_early),
        size_early=_mean_logit_error(start, is_early) / float(along.levels.mean()),
        size_later=_over_starts(start, of_start & (start.places >= from_place), disagreement, of_responses),
        last=_last_over_first(disagreement, of_responses),
        along=along,
        first_place=int(min((places.min() for places in far_places if places.size), default=0)),
        num_agreeing=len(agreeing),
    )


def _mean_logit_error(disagreement: Disagreement, is_chosen: Mask) -> float:
    return float(np.exp(np.log(disagreement.logit_errors[is_chosen]).mean()))


def _of_other_prompts(agreeing: set[int], start: Disagreement, disagreement: Disagreement) -> tuple[Mask, Mask]:
    """Uncertain tokens of the starts and of the responses, without prompts that agree in both: padding and packing
    leave some sequences of a batch as they are, and these do not show how a deviation goes on.
    """
    masks = []
    for part in (start, disagreement):
        sequences = part.pair.sequences
        masks.append(part.uncertain & ~sequences.spread(np.isin(sequences.clusters, list(agreeing))))
    return (masks[0], masks[1]) if all(mask.any() for mask in masks) else (start.uncertain, disagreement.uncertain)


def _agreeing_prompts(part: Disagreement) -> set[int]:
    """Prompts whose tokens deviate by rounding at the median, in all sequences."""
    sequences, near = part.pair.sequences, ~part.is_beyond(FAR_BEYOND)
    agrees = sequences.sum_by_sequence(near & part.uncertain) > sequences.sum_by_sequence(part.uncertain) / 2
    return set(sequences.clusters[agrees].tolist()) - set(sequences.clusters[~agrees].tolist())


def _over_starts(start: Disagreement, is_chosen: Mask, disagreement: Disagreement, of_responses: Mask) -> float:
    """Size in these tokens of the responses over that of the chosen prompt tokens that mu takes for about as likely.

    Real prompts hold many tokens that their model would never sample (a third below p = 1e-3 on SmolLM2, a tenth of its
    responses), and whatever moves the logits moves those most: other weights 2.5 times as much, a temperature 8 times.
    """
    levels = [np.digitize(part.pair.prob_mu, LIKELIHOODS) for part in (start, disagreement)]
    log_ratio, num_tokens = 0.0, 0
    for level in range(len(LIKELIHOODS) + 1):
        at_start, at_response = (
            counts & (levels_of_part == level)
            for counts, levels_of_part in zip((is_chosen, of_responses), levels, strict=True)
        )
        if at_start.sum() >= LEAST_STARTS and (count := int(at_response.sum())):
            log_ratio += count * float(
                np.log(_mean_logit_error(disagreement, at_response) / _mean_logit_error(start, at_start))
            )
            num_tokens += count
    if not num_tokens:
        return _mean_logit_error(disagreement, of_responses) / _mean_logit_error(start, is_chosen)
    return float(np.exp(log_ratio / num_tokens))


def _last_over_first(disagreement: Disagreement, of_responses: Mask) -> float:
    places = disagreement.places[of_responses]
    if places.max() < LEAST_SPAN * places.min():
        return 1.0
    low, high = np.quantile(places, (0.25, 0.75))
    return _mean_logit_error(disagreement, of_responses & (disagreement.places >= high)) / _mean_logit_error(
        disagreement, of_responses & (disagreement.places <= low)
    )


BROAD = 0.3
"""Least share of the responses' uncertain tokens that must deviate."""

LATE = 8
"""A deviation that sets in behind this place has a place where it sets in."""

SMALL_EARLY, LARGER_LATER = 0.4, 1.2
"""Sizes over that of the prompts' starts. Changes of rotation gave 0.01 to 0.33 early; later 1.4 to 17 on small models
and 0.9 to 1.7 on SmolLM2, whose prompts are longer than what the rotation takes to be off altogether."""

GRADUAL = 0.1
"""Size at the second and third place over that of the starts below which the deviation sets in with distance alone, so
that it is no text, however it goes on: text gave 0.1 at least, small changes of rotation 0.02."""

FADED = 0.65
"""Size later in the context over that before, from the prompts' starts to the responses or along the responses: other
text gave 0.1 to 0.6 on small models by one or the other, weights 0.7 to 3 by both."""

LEAST_SLOPE = 0.5
"""Of log deviation against log place, where the prompts' starts were not recorded."""


@SIGNATURES.of(Code.POSITIONS)
def positions(disagreement: Disagreement) -> Cause | None:
    """The cause where the sides agree at the start of the context and part with the place in it."""
    if not disagreement.is_settled or disagreement.is_rounding or disagreement.breadth < BROAD:
        return None
    context = context_profile(disagreement)
    if context is None:
        profile = profile_along(disagreement)
        if profile is None or not profile.surely_above(LEAST_SLOPE):
            return None
        return _other_positions(
            "differ more the later the place in the context", f"deviation for equal uncertainty grows as {profile}"
        )
    if context.at_first > CLEAN_FIRST:
        return None
    if context.first_place > LATE:
        return _other_positions(
            f"agree up to about token {context.first_place} of the context and disagree beyond",
            f"no token before place {context.first_place} of the context deviates far beyond rounding",
        )
    if context.size_early > SMALL_EARLY or context.size_later < _least_later(context):
        return None
    return _other_positions(
        "agree at the first place of the context and differ more the later the place",
        f"deviation for equal uncertainty, over that of the prompts' first tokens: {context.size_early:.2g} at the "
        f"second and third place, {context.size_later:.2g} in the responses",
    )


def _least_later(context: ContextProfile) -> float:
    if not context.spares_first:
        return LARGER_LATER
    return FADED if context.size_early >= GRADUAL else 0.0


def _other_positions(what: str, evidence: str) -> Cause:
    return Cause.of(Code.POSITIONS, [evidence], what=f"they {what}")


MOST_SLOPE = 0.1
"""Of log deviation against log place over the prompts' starts, where these are compared with the responses."""

STEEP_SLOPE = -0.5
"""A slope that only other text was seen to give."""

AT_ONCE = 0.6
"""Least size at the second and third place, over that of the prompts' starts, of text that spares the first place. It
does not grow, and need not fade: of models that attend to the first token much, one that is there twice gave responses
0.74 (SmolLM2) and 1.04 (Gemma 3) times the starts."""


@SIGNATURES.of(Code.PROMPT_PREFIX)
def prompt_prefix(disagreement: Disagreement) -> Cause | None:
    """The cause where the deviation is there from the start of the context and fades along it."""
    if not disagreement.is_settled or disagreement.is_rounding:
        return None
    context = context_profile(disagreement)
    what = "the deviation is largest at its start and decays"
    if context is not None:
        if not _is_of_text(context):
            return None
        if context.at_first <= CLEAN_FIRST:
            what = "they agree at the first place of the context and part behind it, as where its first token is twice"
        evidence = (
            f"deviation for equal uncertainty goes as {context.along} over the prompts' starts; the responses have "
            f"{context.size_later:.2g} times that, and at their ends {context.last:.2g} times that of their beginnings"
        )
    else:
        profile = profile_along(disagreement)
        if profile is None or not profile.surely_below(STEEP_SLOPE):
            return None
        evidence = f"deviation for equal uncertainty falls as {profile}"
    return Cause.of(Code.PROMPT_PREFIX, [evidence], what=what)


def _is_of_text(context: ContextProfile) -> bool:
    if context.at_first <= CLEAN_FIRST:
        at_once = context.spares_first and context.size_early > AT_ONCE and context.size_later < LARGER_LATER
        fades = context.size_early >= GRADUAL and context.size_later < FADED
        return context.first_place <= LATE and (fades or at_once)
    to_responses = context.size_later < FADED and context.along.slope < MOST_SLOPE
    return to_responses or context.last < FADED or (context.along.slope < STEEP_SLOPE and context.size_later < 1)
