"""Causes at places of the context: once in every block, or from one place on.

What works in blocks (chunked prefill, a paged cache, tiles of a kernel) errs at places that are congruent modulo the
block, whatever stands there, and no other token knows of it.

What has a limit (a sliding window, the top-k of a sparse index, the longest context less the draft tokens) errs from
one place of the context on, whatever the response's own place is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.notation import write_count, write_many, write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.bins import (
    less_mean_of_row,
    outstanding_phase,
    outstanding_place,
    rises_of_rows,
    score_of_rest,
)
from mismatch_probe.stats.curves import step_over_growth
from mismatch_probe.stats.sequences import Floats, Ints, Mask, difference
from mismatch_probe.verdict.signatures.profile import (
    FIRST_TOKENS,
    LEAST_SIZES,
    SIGNATURES,
    Disagreement,
    Sizes,
    sizes_of,
)

BLOCKS: Final = sorted([2**power for power in range(4, 15)] + [3 * 2**power for power in range(3, 13)])
"""Sizes that chunks, pages and tiles have, in tokens."""

LEAST_PROMPTS = 3
"""Text that repeats, as the rows of a table do, has a period too, in the responses to one prompt."""
LEAST_AT_PHASE = 8
"""Tokens at one phase that show the size."""

OUTSTANDING, BEYOND_FORM, BEYOND_FORM_BY_CHECKPOINT, OF_TWO_KINDS = 3.0, 10.0, 5.0, 5.0
"""Times the size of the other tokens that the tokens at the phase have at least, and that they have where all of them
may stand behind prompts of lengths that are congruent modulo the block: there lines of a form may make the period.
Forms of SmolLM2's tokens came to 6.7 times. Half is asked of a side and the checkpoint in FP32. And behind prompts of
two lengths, modulo the block, where the forms of two tasks may meet at a phase; they came to 4.4 times.
"""

MOST_KINDS, LEAST_OF_OTHERS = 8, 2.0
"""Kinds of prompts, by their lengths, each of which is left out in turn, the most frequent first: each task may have a
form of its own. And times that tokens of the others must have.
"""

LEAST_STEP, THAN_GROWTH_NATS = 1.75, 5.0
"""Times the size before it that a step has at least, and nats by which it is likelier than growth where it is below
threefold: a window that only weakens what lies outside doubles the deviation. Behind prompts of one length such a step
may as well be one of the response, as where its form changes.
"""

STANDARD_ERRORS = 8.0
"""By which the size at the phase lies above that of others; the largest of 100,000 normal numbers lies 4.3 above."""

STANDARD_ERRORS_OF_REST = 4.0
"""The same without the block that shows it most: a place at which every response does something is no period."""

FELL = 0.5
"""Nats by which mu falls further at the phase than pi where the log alone names the engine: what it records is not what
it draws from. Where pi falls, tokens of a sound engine and those of one that errs look alike.
"""


@dataclass(frozen=True)
class Period:
    """Places of the context, modulo a block, at which the sides lie apart."""

    block: int
    phase: int
    score: float
    """Standard errors by which the size at the phase lies above that elsewhere."""
    times: float
    """The size at the phase over that elsewhere, as `Sizes.times` compares them."""
    at_phase: Mask
    """The tokens at it [T], of those that show it."""
    other_tokens: Mask
    """The others of these [T]."""


def period_of(disagreement: Disagreement, beyond_form: float = BEYOND_FORM) -> Period | None:
    """The block and phase that stand out in two blocks, in responses to three prompts; None where none does. Of several
    the smallest block: in a sure text those of its places that show a size may lie a multiple apart.
    """
    periods = filter(None, (_period_in(disagreement, sizes, beyond_form) for sizes in sizes_of(disagreement)))
    return max(periods, key=lambda period: (-period.block, period.score), default=None)


def _period_in(disagreement: Disagreement, of_tokens: Sizes, beyond_form: float) -> Period | None:
    sequences, mask = disagreement.pair.sequences, of_tokens.mask
    rows = sequences.spread(np.arange(sequences.num_sequences))[mask]
    sizes = less_mean_of_row(of_tokens.logs, rows)
    places = disagreement.places[mask].astype(np.int64) - 1
    blocks = [block for block in BLOCKS if 2 * block <= places.max() + 1]
    score, block, phase = outstanding_phase(sizes, places, blocks, LEAST_AT_PHASE)
    if score < STANDARD_ERRORS:
        return None
    is_at = places % block == phase
    times = of_tokens.times(is_at)
    begins = (places - sequences.positions[mask]) % block
    of_kinds = min(beyond_form, OF_TWO_KINDS) if np.unique(begins[is_at]).size <= 2 else OUTSTANDING
    least = beyond_form if _is_of_one_kind(of_tokens, is_at, begins) else of_kinds
    num_prompts = np.unique(sequences.spread(sequences.cluster_index)[mask][is_at]).size
    if times < least or num_prompts < LEAST_PROMPTS:
        return None
    if score_of_rest(sizes, places // block, is_at) < STANDARD_ERRORS_OF_REST:
        return None
    at_phase = np.zeros_like(mask)
    at_phase[np.flatnonzero(mask)[is_at]] = True
    return Period(block, phase, score, times, at_phase, mask & ~at_phase)


def _is_of_one_kind(of_tokens: Sizes, is_at: Mask, begins: Ints) -> bool:
    """Whether tokens stand out behind prompts of one kind alone. begins: the kind of prompt before each token [N]."""
    kinds, counts = np.unique(begins[is_at], return_counts=True)
    for kind in kinds[np.argsort(-counts, kind="stable")][:MOST_KINDS]:
        rest = begins != kind
        is_at_rest = is_at[rest]
        if is_at_rest.sum() < LEAST_AT_PHASE or is_at_rest.all():
            return True
        if of_tokens.of(rest).times(is_at_rest) < LEAST_OF_OTHERS:
            return True
    return False


@SIGNATURES.of(Code.PERIOD)
def period(disagreement: Disagreement) -> Cause | None:
    """The cause where the sides lie apart at places of the context that are congruent modulo a block."""
    seams = period_of(disagreement)
    if seams is None:
        return None
    side, how = _side_that_errs(disagreement, seams.at_phase, seams.other_tokens)
    return cause_of_period(disagreement, seams, side, [how])


def cause_of_period(disagreement: Disagreement, seams: Period, side: str, evidence: Sequence[str] = ()) -> Cause:
    """The cause with the side that errs; `evidence` follows how far the tokens there deviate."""
    share = float((disagreement.pair.diff[seams.at_phase] ** 2).sum() / (disagreement.pair.diff**2).sum())
    return Cause.of(
        Code.PERIOD,
        side=side,
        block=seams.block,
        phase=seams.phase,
        evidence=[
            f"{write_many(int(seams.at_phase.sum()), 'token')} whose place in the context, from 0, leaves "
            f"{seams.phase} when divided by {seams.block} deviate {write_number(seams.times)} times as much as others "
            f"of equal uncertainty, and make up {write_percent(share)} of d (share of the mean square)",
            *evidence,
        ],
    )


def _side_that_errs(disagreement: Disagreement, is_off: Mask, other_tokens: Mask) -> tuple[str, str]:
    """The side that errs there, and what shows it: its error against a reference, else whose log-prob falls; by
    uncertain tokens, where enough of them stand there.
    """
    pair, uncertain = disagreement.pair, disagreement.uncertain
    if min((is_off & uncertain).sum(), (other_tokens & uncertain).sum()) >= LEAST_AT_PHASE:
        is_off, other_tokens = is_off & uncertain, other_tokens & uncertain
    if pair.log_ref is not None:
        times_pi, times_mu = (
            _median(np.abs(difference(leg, pair.log_ref)), is_off)
            / max(_median(np.abs(difference(leg, pair.log_ref)), other_tokens), disagreement.floor)
            for leg in (pair.log_pi, pair.log_mu)
        )
        side = "The training path" if times_pi > times_mu else "The engine"
        return side, (
            f"median error against the reference there, over that elsewhere: pi {write_number(times_pi)}, mu "
            f"{write_number(times_mu)}"
        )
    falls = [float(leg[other_tokens].mean() - leg[is_off].mean()) for leg in (pair.log_pi, pair.log_mu)]
    of_pi, of_mu = (f"{write_number(abs(fall))} nats {'lower' if fall > 0 else 'higher'}" for fall in falls)
    how = f"the mean log-prob there is {of_pi} for pi, {of_mu} for mu"
    if falls[1] - falls[0] >= FELL:
        return "The engine", how
    if falls[0] - falls[1] >= FELL:
        how += (
            "; so it falls where the training path errs, and as far where the engine samples from what it computes "
            "wrongly: the checkpoint says which"
        )
    return "One side", how


def _median(values: Floats, mask: Mask) -> float:
    return float(np.median(values[mask]))


LEAST_BEHIND = 8
"""Uncertain tokens from the place on."""

MOST_RESPONSES = 1024
AT_ONCE = 0.7
"""Least share of the rise that lies between the tokens right before the place and those from it on: what grows with the
place has none of it there."""

NEAR, NEAR_PLACES = 64, 24
"""Tokens that are compared there, on either side, and places: behind a window the deviation grows with what is lost."""

BEGINS, SURE_OF_BEGIN = 2, 3.0
"""Places right before that lie above the level before them by so many standard errors: the deviation begins earlier."""

ALIKE = 16
"""Places by which those of the context and of the response may differ among responses and be hard to tell apart."""

OF_PROMPTS = 0.75
"""Least share of the prompts whose responses rise there."""

OF_ANOTHER_KIND = 1.02
"""Times the score that places of the response, from its start or its end, have at most."""

LAST_PLACES, ENDS_ALIKE = 16, 4
"""So many before the longest context look like its limit: more draft tokens are rare. Where responses that reach them
end within so many places, behind prompts of one length, they may be how these responses end.
"""


@dataclass(frozen=True)
class Onset:
    """The place of the context, from 0, from which on the sides lie apart."""

    place: int
    first_possible: int
    """No token that shows it stands between this place and `place`."""
    longest: int
    """The context of the longest response."""
    score: float
    """Standard errors by which the size rises there."""
    times: float
    """The size from there on over that before, in the same way."""
    after: Mask
    """The tokens from there on [T], of those that show it."""
    before: Mask
    """The others of these [T]."""

    @property
    def words(self) -> str:
        """What the place looks like."""
        limit = next((size for size in _LIMITS if self.first_possible - 1 <= size <= self.place), None)
        if limit is not None:
            what = f"a sliding window or a sparse index of {write_count(limit)} tokens"
            return f", as where {what} ends"
        if self.longest - self.place <= LAST_PLACES:
            num_last = write_many(self.longest - self.place, "place")
            what = "the last" if self.longest - self.place > 1 else "that is the last"
            return (
                f", {what} {num_last} before the longest context ({write_count(self.longest)}), as where draft tokens "
                "run beyond max_model_len"
            )
        return ""


_LIMITS: Final = sorted({2**power for power in range(5, 18)} | {3 * 2**power for power in range(4, 15)})
"""Sizes that windows and sparse indices have, in tokens."""


def onset_of(disagreement: Disagreement, beyond_form: float = BEYOND_FORM) -> Onset | None:
    """The place from which on the deviation is three times as large, or surely larger and not by growth, at once, in
    responses to three prompts that have tokens on both sides of it; None where there is none. Of several the surest.
    """
    onsets = filter(None, (_onset_in(disagreement, sizes, beyond_form) for sizes in sizes_of(disagreement)))
    return max(onsets, key=lambda onset: onset.score, default=None)


def _onset_in(disagreement: Disagreement, sizes_of_tokens: Sizes, beyond_form: float) -> Onset | None:
    sequences, mask = disagreement.pair.sequences, sizes_of_tokens.mask
    rows = sequences.spread(np.arange(sequences.num_sequences))
    has_same_bits = (sequences.positions < FIRST_TOKENS) & (disagreement.pair.diff == 0)  # as where a prefill has them
    is_seen = mask & (rows < MOST_RESPONSES) & ~has_same_bits
    if is_seen.sum() < LEAST_SIZES:
        return None
    rows, is_first = rows[is_seen], is_seen[mask]
    sizes = sizes_of_tokens.logs[is_first]
    places = disagreement.places[is_seen].astype(np.int64) - 1
    place, score = outstanding_place(sizes, places, rows)
    if score < STANDARD_ERRORS or any(
        score * lead < outstanding_place(sizes, other, rows)[1]
        for other, lead in _other_places(disagreement, is_seen, places)
    ):
        return None
    is_behind = places >= place
    rises, weights = rises_of_rows(sizes, is_behind, rows)
    clusters = sequences.cluster_index[: rows.max() + 1]
    of_prompts = np.bincount(clusters, rises * weights, minlength=1), np.bincount(clusters, weights, minlength=1)
    has_both = of_prompts[1] > 0
    prompt_rises = of_prompts[0][has_both] / of_prompts[1][has_both]
    if has_both.sum() < LEAST_PROMPTS or (prompt_rises > 0).mean() < OF_PROMPTS or is_behind.sum() < LEAST_BEHIND:
        return None
    rise = float((rises * weights).sum() / weights.sum())
    times = sizes_of_tokens.of(is_first).times(is_behind)
    pull = of_prompts[0][has_both] * np.sqrt(1 / of_prompts[1][has_both])
    is_rest = np.arange(pull.size) != pull.argmax()
    spread = float(np.std(less_mean_of_row(sizes, rows)))
    rest = of_prompts[0][has_both][is_rest].sum() / np.sqrt(of_prompts[1][has_both][is_rest].sum()) / spread
    if times < LEAST_STEP or rest < STANDARD_ERRORS_OF_REST or _rise_at(sizes, places, place) < AT_ONCE * rise:
        return None
    own, from_end = (other for other, _ in _other_places(disagreement, is_seen, places))
    is_of_response = np.ptp(places - own) == 0
    is_near_end = places.max() - place < LAST_PLACES and np.ptp((places - from_end)[is_behind]) <= ENDS_ALIKE
    if is_near_end and times < beyond_form and _is_of_one_kind(sizes_of_tokens.of(is_first), is_behind, places - own):
        return None
    if times < OUTSTANDING and (
        is_of_response or step_over_growth(sizes, is_behind, [places, own, from_end], rows) < THAN_GROWTH_NATS
    ):
        return None
    place = _where_it_begins(sizes, places, place)
    after = np.zeros_like(is_seen)
    after[np.flatnonzero(is_seen)[places >= place]] = True
    return Onset(
        place=place,
        first_possible=int(places[places < place].max()) + 1,
        longest=int(disagreement.places.max()),
        score=score,
        times=times,
        after=after,
        before=is_seen & ~after,
    )


def large_from_place(disagreement: Disagreement) -> Mask | None:
    """Unsure tokens [T] from the place of the context on from which the deviation rises most surely; None where it does
    not rise, or too few tokens show it. What else may stand there is not asked, as `onset_of` does.
    """
    sequences, uncertain = disagreement.pair.sequences, disagreement.uncertain
    if uncertain.sum() < LEAST_SIZES:
        return None
    places, rows = disagreement.places.astype(np.int64) - 1, sequences.spread(np.arange(sequences.num_sequences))
    place, score = outstanding_place(np.log(disagreement.logit_errors[uncertain]), places[uncertain], rows[uncertain])
    return None if score < STANDARD_ERRORS else np.asarray(uncertain & (places >= place))


def _other_places(disagreement: Disagreement, is_seen: Mask, places: Ints) -> Iterator[tuple[Ints, float]]:
    """Each token's place in its response, and from its end, with how many times the score of the context's places its
    own must have to count. Where prompts are of nearly one length, the scores are nearly equal.
    """
    sequences = disagreement.pair.sequences
    own = sequences.positions.astype(np.int64)[is_seen]
    from_end = own - sequences.spread(sequences.lengths)[is_seen]
    for other in (own, from_end):
        yield other, OF_ANOTHER_KIND if np.ptp(places - other) > ALIKE else 1.0


def _rise_at(sizes: Floats, places: Ints, place: int) -> float:
    """From the tokens right before the place to those right behind it."""
    before, after = np.flatnonzero(places < place), np.flatnonzero(places >= place)
    nearest = [
        side[np.argsort(np.abs(places[side] - place), kind="stable")[: max(NEAR, int(is_near.sum()))]]
        for side in (before, after)
        for is_near in [np.abs(places[side] - place) <= NEAR_PLACES]
    ]
    return float(sizes[nearest[1]].mean() - sizes[nearest[0]].mean())


def _where_it_begins(sizes: Floats, places: Ints, place: int) -> int:
    """The place, or the earlier one where what grows from there on begins."""
    is_before = places < place - NEAR_PLACES
    if is_before.sum() < NEAR:
        return place
    level, spread = float(sizes[is_before].mean()), float(sizes[is_before].std())
    for first in range(place, place - NEAR_PLACES, -1):
        at = sizes[(places >= first - BEGINS) & (places < first)]
        if not at.size or at.mean() - level < SURE_OF_BEGIN * max(spread, 1e-12) / np.sqrt(at.size):
            return first
    return place


@SIGNATURES.of(Code.ONSET)
def onset(disagreement: Disagreement) -> Cause | None:
    """The cause where the sides lie apart from one place of the context on."""
    step = onset_of(disagreement)
    if step is None or period_of(disagreement) is not None:  # the last place of a period looks like an onset
        return None
    side, how = _side_that_errs(disagreement, step.after, step.before)
    return cause_of_onset(disagreement, step, side, [how])


def cause_of_onset(disagreement: Disagreement, step: Onset, side: str, evidence: Sequence[str] = ()) -> Cause:
    """As `cause_of_period`."""
    share = float((disagreement.pair.diff[step.after] ** 2).sum() / (disagreement.pair.diff**2).sum())
    return Cause.of(
        Code.ONSET,
        side=side,
        place=write_count(step.place),
        what=step.words,
        evidence=[
            f"{write_many(int(step.after.sum()), 'token')} from place {write_count(step.place)} of the "
            f"context on (counted from 0) deviate {write_number(step.times)} times as much as the tokens before "
            f"it, of equal uncertainty, and make up {write_percent(share)} of d (share of the mean square)",
            *evidence,
        ],
    )
