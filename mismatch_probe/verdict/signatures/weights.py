"""Causes in what computes: other weights, other experts, passes that do not repeat.

The same leg twice differs; decode and prefill of one engine differ; the training path's two FP32 passes over the same
ids differ from each other as much as from the engine, each by errors of its own; its two FP64 passes differ; or what
two prompts begin with alike differs, as behind padding that is attended to. None of these involves the other side.

Every token of every response deviates, from the first place of the context on, where neither positions nor caches have
a say, and without the fading of different text. What is left when rounding, sampling, labels, prompts and positions
are ruled out.

Few tokens carry most of the squared deviation, only in mixtures of experts, and it vanishes in FP32. Where both sides'
choices were recorded, the tokens that deviate must be those whose experts moved.

In FP32 the same router on the same hidden states turns at most a near tie in a thousand tokens. Where it does more, the
first layer that differs says how far the two sides agree.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_estimate, write_many, write_number, write_percent
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.results import LayerRouting, RoutingCheck
from mismatch_probe.stats.sequences import Floats, Reals, Sequences, TokenPair, difference
from mismatch_probe.stats.subsamples import MOVED
from mismatch_probe.verdict.signatures.context import context_profile
from mismatch_probe.verdict.signatures.profile import (
    SIGNATURES,
    Disagreement,
    lower_bound,
    root_mean_square,
    usual_nats,
)

BEYOND_ROUNDING = 8.0
"""Times the floor; two passes of one implementation differ by about the floor itself."""

REPEATS = {
    "pi_again": "the same tokens scored twice get other log-probs",
    "pi_other_batch": "log-probs depend on what shares the batch",
    "mu_other_batch": "log-probs depend on what shares the batch",
    "mu_decoded_alone": "log-probs of decoding depend on what shares the batch",
    "mu_cached": "log-probs change behind the prefix cache",
    "mu_siblings": "one token behind equal tokens has other log-probs in each response to a prompt",
    "pi_siblings": "one token behind equal tokens has other log-probs in each response to a prompt",
}
"""Repeated legs that must give the same; another implementation of attention, also recorded, need not."""

SIBLINGS = ("mu_siblings", "pi_siblings")
"""What responses to one prompt share before they part: a log shows it without a checkpoint."""

OTHER_BATCHES = ("pi_other_batch", "mu_other_batch", "mu_decoded_alone", *SIBLINGS)
"""Another batch is another kernel, or another order of sums: in 16 bit only the reference shows how far these may
round differently."""

REPEATS_IN_FP64 = 1e-6
"""Nats between two FP64 passes over the same tokens, a thousand times what rounding in FP64 makes where FP32 errs by a
nat. More is no rounding: dropout, padding that is attended to, another state."""

LEAST_IN_STARTS = 1e-3
"""Nats (rms) between what one side in FP32 gives a token behind equal tokens in two prompts: a thousand times what
another order of sums makes. More is another context, which the ids do not show, or another state."""

STARTS = {"pi_starts": ("The training path", ""), "mu_starts": ("The engine", "engine")}

SHARED = 0.8
"""Correlation of two passes' deviations from the engine above which they make one and the same error."""


LEAST_RESPONSES = 3
LEAST_TOKENS = 32
"""Of what was computed twice: in 16 bits one unlikely token moves by a nat, and with it the mean of a few."""


@dataclass(frozen=True)
class Repetition:
    """Tokens that one side computed twice."""

    side: str
    what: str
    """What they would show."""
    deviation: Floats
    """d of the two times [T], response after response."""
    sequences: Sequences
    floor: float
    """What rounding gives (nats)."""
    variant: str = ""
    """Which words of the cause are this side's."""

    @property
    def size(self) -> float:
        """Root mean square, nats."""
        return root_mean_square(self.deviation)

    @property
    def is_beyond(self) -> bool:
        """Whether it is far more than rounding."""
        return self.size > BEYOND_ROUNDING * self.floor

    @property
    def why_unshown(self) -> str | None:
        """Why so much does not show it; None where it does: without the response that differs most, too."""
        sequences = self.sequences
        if sequences.num_sequences < LEAST_RESPONSES or sequences.num_tokens < LEAST_TOKENS:
            tokens, responses = (sequences.num_tokens, "token"), (sequences.num_sequences, "response")
            return f"which {write_many(*tokens)} of {write_many(*responses)} are too little to tell"
        squares = sequences.sum_by_sequence(self.deviation**2)
        rest = np.arange(squares.size) != squares.argmax()
        without_largest = float(np.sqrt(squares[rest].sum() / sequences.lengths[rest].sum()))
        return None if without_largest > BEYOND_ROUNDING * self.floor else "which lies in one response alone"


@SIGNATURES.of(Code.NOT_REPEATABLE)
def not_repeatable(disagreement: Disagreement) -> Cause | None:
    """The cause for the first side that contradicts itself by far more than rounding, in more than one response."""
    repetitions = (each for each in _repetitions(disagreement) if each.is_beyond and each.why_unshown is None)
    for repetition in (*repetitions, *_contradictions_in_starts(disagreement)):
        return Cause.of(
            Code.NOT_REPEATABLE,
            variant=repetition.variant,
            side=repetition.side,
            what=repetition.what,
            evidence=[
                f"rms difference {write_number(repetition.size)} nats, where rounding gives about "
                f"{write_number(repetition.floor)}"
            ],
        )
    if is_no_rounding(disagreement.exact_repeat):
        return Cause.of(
            Code.NOT_REPEATABLE,
            side="The training path",
            what="two FP64 passes over the same tokens differ",
            evidence=[f"median difference {write_number(disagreement.exact_repeat)} nats, which no rounding makes"],
        )
    return None


def _contradictions_in_starts(disagreement: Disagreement) -> Iterator[Repetition]:
    """The sides of an FP32 pair known to disagree that give one token behind equal tokens other log-probs in each
    prompt. A single token shows it: the ids, the weights and the places are the same. Experts may flip near a tie.
    """
    start = disagreement.prompt_start
    if start is None or not (disagreement.is_exact and disagreement.is_settled) or disagreement.has_experts:
        return
    for name, (side, variant) in STARTS.items():
        if name in start.pair.repeats:
            repeat, what = start.pair.repeats[name], "one token behind equal tokens has other log-probs in each prompt"
            repetition = Repetition(side, what, repeat.diff, repeat.sequences, start.floor, variant)
            if repetition.is_beyond and repetition.size > LEAST_IN_STARTS:
                yield repetition


def is_no_rounding(exact_repeat: float | None) -> TypeGuard[float]:
    """Whether two passes in FP64 over the same tokens differ, so that what they differ by from FP32 is not rounding."""
    return exact_repeat is not None and not exact_repeat <= REPEATS_IN_FP64


def with_unshown_repetitions(disagreement: Disagreement | None, verdict: Verdict) -> Verdict:
    """The verdict; its evidence names a side that contradicts itself in too few tokens to decide."""
    if disagreement is None or Code.NOT_REPEATABLE in (verdict.code, *(cause.code for cause in verdict.also)):
        return verdict
    unshown = next((each for each in _repetitions(disagreement) if each.is_beyond and each.why_unshown), None)
    if unshown is None:
        return verdict
    evidence = (
        f"{unshown.side} may not agree with itself ({unshown.what}): rms difference {write_number(unshown.size)} nats, "
        f"where rounding gives about {write_number(unshown.floor)}, {unshown.why_unshown}"
    )
    advice = (
        f"{unshown.side}'s own noise was measured on too little to judge it by: compare more responses, and leave "
        "floors.num_sequences at 16 or more."
    )
    return verdict.model_copy(update={"evidence": [*verdict.evidence, evidence], "advice": [*verdict.advice, advice]})


def floor_with_noise(pair: TokenPair, dtypes: Sequence[Dtype], rounding_floor: float) -> float:
    """The rms of d (nats) that rounding or the sides' own noise gives, whichever is larger. Noise is measured on the
    tokens that responses to one prompt share. Far beyond rounding it is no floor: the side contradicts itself, or its
    contexts differ in what the log does not hold.
    """
    repeats = [pair.repeats[name] for name in SIBLINGS if name in pair.repeats]
    noise = math.sqrt(sum(root_mean_square(repeat.diff) ** 2 for repeat in repeats) / 2)
    is_measured = pair.log_ref is not None or pair.log_mu_prefill is not None
    most = BEYOND_ROUNDING * (rounding_floor if is_measured else usual_nats(*dtypes))
    return max(rounding_floor, noise) if noise <= most else rounding_floor


def _own_floor(disagreement: Disagreement, first: Reals, second: Reals) -> float:
    """What rounding gives this side: in 16 bit no less than the smaller of its own two errors."""
    reference = disagreement.pair.log_ref
    if reference is None or disagreement.is_exact:
        return disagreement.floor
    return max(disagreement.floor, min(root_mean_square(difference(leg, reference)) for leg in (first, second)))


def _repetitions(disagreement: Disagreement) -> Iterator[Repetition]:
    pair, sequences = disagreement.pair, disagreement.pair.sequences
    log_mu_prefill = pair.log_mu if pair.log_mu_prefill is None else pair.log_mu_prefill
    of_engine = _own_floor(disagreement, pair.log_mu, log_mu_prefill)
    for name, what in REPEATS.items():
        if name in pair.repeats:
            if name in OTHER_BATCHES and pair.log_ref is None and not disagreement.is_exact:
                continue
            repeat_diff, of_repeat = pair.repeats[name].diff, pair.repeats[name].sequences
            if name.startswith("pi_"):
                yield Repetition("The training path", what, repeat_diff, of_repeat, disagreement.floor)
            else:
                yield Repetition("The engine", what, repeat_diff, of_repeat, of_engine, "engine")
    if pair.log_mu_prefill is not None and disagreement.repeats_decode:
        yield Repetition(
            "The engine",
            "decoding and prefill give the same tokens other log-probs",
            difference(pair.log_mu, pair.log_mu_prefill),
            sequences,
            of_engine,
            "engine",
        )
    if pair.log_ref is not None and disagreement.is_exact and disagreement.ref_repeats_pi:
        errors = difference(pair.log_pi, pair.log_mu), difference(pair.log_ref, pair.log_mu)
        if all(
            root_mean_square(error) > BEYOND_ROUNDING * disagreement.floor for error in errors
        ) and not _are_correlated(*errors):
            repeat_diff, what = difference(pair.log_pi, pair.log_ref), "two FP32 passes over the same tokens differ"
            yield Repetition("The training path", what, repeat_diff, sequences, disagreement.floor)


def _are_correlated(first: Floats, second: Floats) -> bool:
    return float(np.corrcoef(first, second)[0, 1]) > SHARED


BROAD = 0.8
"""Least share of uncertain tokens that deviate by more than rounding, in all and at the first place of the context."""

SLOPES = (-0.4, 1.0)
"""Of log deviation against log place over the prompts' starts: weights gave -0.3 to 0.8 on small models."""

LATER = (0.7, 4.0)
"""Size in the responses over that in the prompts' starts: weights gave 0.8 to 3 on small models, 0.74 to 1 on
SmolLM2."""


@SIGNATURES.of(Code.STALE_WEIGHTS)
def stale_weights(disagreement: Disagreement) -> Cause | None:
    """The cause where the deviation is everywhere; None where the start of the context was not recorded."""
    if not disagreement.is_settled or disagreement.is_rounding:
        return None
    context = context_profile(disagreement)
    if context is None or min(context.at_first, disagreement.breadth) < BROAD:
        return None
    if not SLOPES[0] < context.along.slope < SLOPES[1] or not LATER[0] < context.size_later < LATER[1]:
        return None
    if context.last < LATER[0]:
        return None
    return Cause.of(
        Code.STALE_WEIGHTS,
        size=write_number(disagreement.rms),
        evidence=[
            f"{write_percent(disagreement.breadth)} of uncertain tokens deviate by more than rounding, "
            f"{write_percent(context.at_first)} at the first place of the context",
            f"deviation for equal uncertainty goes as {context.along} over the prompts' starts; the responses have "
            f"{context.size_later:.2g} times that: neither other text nor positions",
        ],
    )


TAIL = 0.01
HEAVY = 0.3
"""Share of the sum of d^2 in the largest hundredth of tokens; 0.08 for a Gaussian."""

WHERE_MOVED = 0.3
"""Share of the sum of d^2 in the tenth of tokens whose experts moved most; 0.1 where the two are unrelated."""


def routing(disagreement: Disagreement) -> Cause | None:
    """The cause for a mixture of experts whose deviation lies in a heavy tail, and where experts moved if recorded."""
    if not disagreement.has_experts:
        return None
    squares = np.sort(disagreement.pair.diff**2)[::-1]
    total = float(squares.sum())
    share = float(squares[: max(1, round(TAIL * squares.size))].sum()) / total if total else 0.0
    if share < HEAVY or (disagreement.routing is not None and not _lies_where_moved(disagreement.routing)):
        return None
    return Cause.of(
        Code.ROUTING,
        what=f"1 % of the tokens make {write_percent(share)} of d (share of the mean square), as flips of experts do",
        evidence=[
            "the checkpoint is a mixture of experts, whose choice of experts is sensitive to rounding",
            f"median abs(d) {write_number(float(np.median(disagreement.pair.abs_diff)))}, largest "
            f"{write_number(float(disagreement.pair.abs_diff.max()))} nats",
            *([] if disagreement.routing is None else choices(disagreement.routing)),
        ],
    )


def choices(check: RoutingCheck) -> list[str]:
    """What was recorded of both sides' choices, as evidence."""
    lines = [
        f"the two sides take other experts for {write_estimate(check.in_some_layer)} of the tokens in some layer, and "
        f"their experts' weights are {write_estimate(check.weight_distance)} apart on average"
    ]
    if check.squares_where_moved is not None:
        lines.append(
            f"the tenth of tokens whose experts moved most carries {write_estimate(check.squares_where_moved)} of the "
            f"squared deviation, where {MOVED:g} is what unrelated tokens would"
        )
    return lines


def _lies_where_moved(check: RoutingCheck) -> bool:
    share = check.squares_where_moved
    return check.in_some_layer.value > 0 and share is not None and share.value >= WHERE_MOVED


NEAR_TIES = 1e-3
"""Share of tokens for which two right FP32 implementations may take other experts."""

ROUNDED_WEIGHTS = 1e-3
"""Distance of the experts' weights that FP32 cannot reach by rounding: 1e-5 was measured at most on small models."""


def other_experts(disagreement: Disagreement) -> Cause | None:
    """The cause for a pair in FP32 whose sides are known to disagree, and disagree on the experts."""
    if disagreement.routing is None or not disagreement.is_exact or not disagreement.is_settled:
        return None
    layers = disagreement.routing.layers
    first = next((layer for layer in layers if _differs(layer)), None)
    if first is None:
        return None
    place_words = (
        "it is the first layer that has experts: its router, or what reaches it, differs"
        if first is layers[0]
        else f"the layers before it that have experts, from {layers[0].layer} on, choose and weigh alike"
    )
    return Cause.of(
        Code.OTHER_EXPERTS,
        layer=first.layer,
        share=write_percent(first.other_experts.value),
        distance=write_number(first.weight_distance.value),
        evidence=[place_words, *choices(disagreement.routing)],
    )


def agree_before(disagreement: Disagreement) -> bool:
    """Whether layers with experts come before the first that differs, so that the weights there are the same."""
    return disagreement.routing is not None and not _differs(disagreement.routing.layers[0])


def _differs(layer: LayerRouting) -> bool:
    return lower_bound(layer.other_experts) > NEAR_TIES or lower_bound(layer.weight_distance) > ROUNDED_WEIGHTS
