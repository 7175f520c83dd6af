"""Causes in the distribution: temperature, cut vocabulary, other sampler, other base of logarithms.

Over tokens drawn from pi the mean of log pi + H is 0, H being pi's entropy at each token. Where the sides agree and it
is not, the engine sampled from a distribution that neither side's log-probs are of: raw log-probs on both sides, as
vLLM gives by default. A sharper distribution (a temperature below, top-p, top-k) makes it positive, a flatter one
negative.

If mu keeps a part of the vocabulary with mass K under pi and renormalises, log mu = log pi - log K for every sampled
token: d = log K <= 0, never above 0, and the mean of e^d is the kept mass instead of 1. Two policies that normalise
over the same support have mean e^d = 1 under mu, however much they round, so d cannot be one-signed.

How far d lies on the side of 0 to which no truncation can bring it is the size of rounding, as d itself shows it: it
counts where the measured floor is larger than what is cut, or was not measured at all.
"""

import math
from collections.abc import Iterator

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.bases import BaseSums, OtherBase, base_of_entropies
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.metrics import weight_excess
from mismatch_probe.stats.rounding import LeastSquares, temperature_columns
from mismatch_probe.stats.sequences import Floats, TokenPair, difference
from mismatch_probe.verdict.signatures.places import large_from_place, period_of
from mismatch_probe.verdict.signatures.profile import SIGNATURES, Disagreement, root_mean_square

LEAST_NATS = 0.02
"""Mean surprise below which nobody need care, and to which entropies in 16 bit are exact."""

LEAST_TOKENS_SAMPLER = 200

FAR_OUTSIDE_SAMPLER = 5.0
"""Standard errors by which the mean surprise must miss 0: over responses, and over tokens, which are a martingale."""

VARIANCE_OF_ENTROPY = 5.0
FEW_NATS = 200.0
"""Times the entropy, the least variance of a token's surprise where all entropies add up to so little: where hardly an
unlikely token came up it varies too little."""

BY_DEVIATION = 2.0
"""Times the most that a mu which lies d from pi can move the mean surprise, by Cauchy and Schwarz: rms(s) rms(d)."""


@SIGNATURES.of((Code.TEMPERATURE, "sampler"))
def sampled_otherwise(disagreement: Disagreement) -> Cause | None:
    """The cause where the tokens are more, or less, likely than pi's entropy says; None without entropy, and where that
    looks like logarithms to another base.
    """
    pair = disagreement.pair
    if pair.entropy_pi is None or pair.sequences.num_tokens < LEAST_TOKENS_SAMPLER:
        return None
    entropy = pair.entropy_pi.astype(np.float64)
    log_pi = pair.log_pi.astype(np.float64)
    if base_of_entropies(log_pi, entropy) is not None:
        return None
    surprise = log_pi + entropy
    mean = float(surprise.mean())
    least_variance = VARIANCE_OF_ENTROPY * float(entropy.mean()) if entropy.sum() < FEW_NATS else 0.0
    over_tokens = np.sqrt(max(float(np.mean(surprise**2)), least_variance) / surprise.size)
    of_responses = pair.sequences.sum_by_sequence(surprise - mean)
    over_responses = np.sqrt(np.sum(of_responses**2)) / surprise.size
    least = max(
        LEAST_NATS,
        FAR_OUTSIDE_SAMPLER * over_tokens,
        FAR_OUTSIDE_SAMPLER * over_responses,
        BY_DEVIATION * root_mean_square(surprise) * disagreement.rms,
    )
    if abs(mean) < least:
        return None
    flatter = mean < 0
    return Cause.of(
        Code.TEMPERATURE,
        variant="sampler",
        flatter="flatter" if flatter else "sharper",
        evidence=[
            f"the tokens are {write_number(abs(mean))} nats {'less' if flatter else 'more'} likely than the training "
            f"path's entropy of {write_number(float(entropy.mean()))} nats says, where tokens drawn from it are within "
            f"{write_number(float(least))}",
            "so sampling had a temperature "
            + ("above that of the log-probs" if flatter else "below that of the log-probs, top-p, top-k or min-p"),
        ],
    )


WRONG_SIGN = 0.005
"""Most tokens that may lie on the wrong side of zero by more than rounding."""

ROUNDING_IN_FLOORS = 6.0
"""Floors that rounding moves a token at most."""

LEAST_TRUNCATED = 0.02
"""Least share of tokens whose context was truncated by more than rounding."""

VARIATION_IN_FLOORS = 3.0
VARIATION_IN_MEANS = 0.1
"""Standard deviation of d, by either measure: kept mass varies from context to context, a constant offset does not."""

LEAST_CORRELATION = 0.8
"""Of the two sides' log-probs, where rounding is read from d: those of other tokens can lie on one side of 0, too."""

LEAST_KEPT = 0.2
"""Mass that a cut leaves at least where the sides do not correlate: top-k 1 of 200 tokens with logits of standard
deviation 3 leaves 0.39, a side that scores other tokens, or all tokens alike, 0.02 or less."""

LEAST_CUT = 0.01
"""Mass that must be cut for that: a log-softmax in 16 bit moves the mean weight by 0.005."""

FAR_OUTSIDE = 8.0
"""Standard errors by which the mean weight must miss 1: over responses, or, where hardly a token lies on the wrong side
of 0 beyond rounding, over tokens, whose weights have mean 1 whatever came before them where both sides keep all tokens.
Of few responses a cut that is deep in some and not in others has a large error over responses."""


ELSEWHERE = 0.2
"""Mean abs(d) of unsure tokens at other places, over that at the places of a period or behind a place."""


@SIGNATURES.of(Code.TRUNCATED_SUPPORT)
def truncated_support(disagreement: Disagreement) -> Cause | None:
    """The cause where d is one-signed and the weights' mean is the kept mass.

    The engine's own prefill, which covers the whole vocabulary, stands in for pi where it was recorded, so that
    nothing else which differs between the sides can hide it: there a cut of like mass in all contexts is one too.
    """
    pair = disagreement.pair
    own = [] if pair.log_mu_prefill is None else [difference(pair.log_mu_prefill, pair.log_mu)]
    for d, is_own in (*((each, True) for each in own), (pair.diff, False)):
        cause = _one_signed(disagreement, d, -1.0, "The engine", may_be_constant=is_own)
        if cause is not None:
            return None if _is_at_places(disagreement, d) else cause
    cause = _one_signed(disagreement, pair.diff, 1.0, "The training path")
    return None if cause is None or _is_at_places(disagreement, pair.diff) else cause


def _is_at_places(disagreement: Disagreement, diff: Floats) -> bool:
    """Whether d is large at places of the context alone: a vocabulary is cut at all of them."""
    seams, from_place = period_of(disagreement), large_from_place(disagreement)
    sizes, places = np.abs(diff), [] if seams is None else [(seams.at_phase, seams.other_tokens)]
    if from_place is not None:
        places.append((from_place, disagreement.uncertain & ~from_place))
    return any(sizes[others].mean() < ELSEWHERE * sizes[at].mean() for at, others in places)


def _one_signed(
    disagreement: Disagreement, diff: Floats, sign: float, side: str, *, may_be_constant: bool = False
) -> Cause | None:
    d = sign * diff
    least = min(VARIATION_IN_FLOORS * disagreement.floor, VARIATION_IN_MEANS * abs(float(np.mean(d))))
    excess = weight_excess(diff)
    weight = Estimator(disagreement.pair.sequences).mean(1 + excess, "token", Scale.POSITIVE)
    if (np.std(d) < least and not may_be_constant) or weight is None or weight.standard_error is None:
        return None
    is_one_sided = float(np.mean(d < -ROUNDING_IN_FLOORS * disagreement.floor)) <= WRONG_SIGN
    over_tokens = root_mean_square(excess) / math.sqrt(excess.size) if is_one_sided else math.inf
    error = min(weight.standard_error, over_tokens)
    kept_share = weight.value if sign < 0 else 1 / weight.value
    if kept_share < LEAST_KEPT and not _correlate(disagreement.pair):
        return None
    cut_share = sign * (weight.value - 1)
    shares = [
        (float(np.mean(d < -tolerance)), float(np.mean(d > tolerance)))
        for tolerance, least_cut in _tolerances(disagreement, d)
        if cut_share >= max(least_cut, FAR_OUTSIDE * error)
    ]
    wrong, truncation = next(
        (share for share in shares if share[0] <= WRONG_SIGN and share[1] >= LEAST_TRUNCATED), (1.0, 0.0)
    )
    if not truncation:
        return None
    return Cause.of(
        Code.TRUNCATED_SUPPORT,
        side=side,
        evidence=[
            f"d is one-signed: {write_percent(truncation)} of tokens lie beyond rounding on one side of 0, "
            f"{write_percent(wrong)} on the other",
            f"the mean weight is {weight.value:.4f} instead of 1: the kept mass",
            f"largest abs(d): {write_number(float(np.abs(diff).max()))} nats",
        ],
    )


def _tolerances(disagreement: Disagreement, d: Floats) -> Iterator[tuple[float, float]]:
    """What rounding can do to a token (nats), and the least mass that must be cut: by the measured floor, then by how
    far d lies on the wrong side of 0.
    """
    yield ROUNDING_IN_FLOORS * disagreement.floor, 0.0
    if _correlate(disagreement.pair):
        yield max(float(np.quantile(-d, 1 - WRONG_SIGN, method="higher")), 0.0), LEAST_CUT


def _correlate(pair: TokenPair) -> bool:
    varies = pair.log_mu.std() > 0 and pair.log_pi.std() > 0
    return bool(varies and np.corrcoef(pair.log_pi, pair.log_mu)[0, 1] >= LEAST_CORRELATION)


UNEXPLAINED_RMS = 0.35
"""Of the rms of d, the most that the fit may leave: it then explains 88 % of the variance."""

UNEXPLAINED_RMS_NEAR_1 = 0.7
NEAR_1 = 4 / 3
"""A ratio from 3/4 to 4/3 may leave this much, as one near 1 does under 16-bit rounding. Other weights that move
log-probs by s nats have a slope too, since tokens were sampled from mu: of about s^2, which explains s^2 of d's square.
So with a slope of less than a third they explain less than that."""

RATIOS = (0.2, 5.0)
"""Beyond these one side has lost the plot: d is then its own log-prob, whatever the cause."""

HALVES_AGREE = 0.25
"""Largest relative difference of the slopes fitted to the less and to the more uncertain half of the tokens."""

LEAST_OF_HALF = 8
"""Tokens in each."""

OWN_SHARE = 0.5
"""Of the variance that is left without the token's own log-prob, the least that this explains."""


LEAST_TOKENS = 32
"""A line through three numbers a token fits any few of them."""


@SIGNATURES.of(Code.TEMPERATURE)
def temperature(disagreement: Disagreement) -> Cause | None:
    """The cause where d follows the logit scale; None elsewhere, for few tokens, and without pi's entropy."""
    pair = disagreement.pair
    if pair.entropy_pi is None or disagreement.is_rounding or pair.sequences.num_tokens < LEAST_TOKENS:
        return None
    entropy = pair.entropy_pi.astype(np.float64)
    columns = temperature_columns(pair.log_pi, entropy)
    without = pair.diff - LeastSquares(columns[:, 1:], pair.diff).predictions
    fit = LeastSquares(columns, pair.diff)
    rest = root_mean_square(pair.diff - fit.predictions)
    ratio = float(1 - fit.coefficients[0])
    at_most = UNEXPLAINED_RMS_NEAR_1 if 1 / NEAR_1 <= ratio <= NEAR_1 else UNEXPLAINED_RMS
    explains = (
        rest <= max(at_most * disagreement.rms, 2 * disagreement.floor)
        and root_mean_square(fit.predictions) > 2 * disagreement.floor
    )
    own = 1 - rest**2 / root_mean_square(without) ** 2
    if not explains or own < OWN_SHARE or not RATIOS[0] < ratio < RATIOS[1] or not _halves_agree(columns, disagreement):
        return None
    return Cause.of(
        Code.TEMPERATURE,
        ratio=ratio,
        evidence=[
            f"d follows the logit scale: a temperature ratio of {ratio:.4g} explains "
            f"{write_percent(1 - rest**2 / disagreement.rms**2)} of it (share of the mean square) and leaves "
            f"{write_number(rest)} nats",
            _sampled_from(columns[:, 0]),
        ],
    )


def _halves_agree(columns: Floats, disagreement: Disagreement) -> bool:
    """Whether certain and uncertain contexts have the same slope, as one temperature makes them.

    Tokens of which both sides are sure are left out: where only the likeliest token comes up its log-prob is a function
    of the context, as the other columns are, and tells nothing of the slope. In texts of a sure model they are the
    whole certain half.
    """
    tells, values = disagreement.uncertain, disagreement.pair.diff
    is_above = columns[:, 1] > np.median(columns[tells, 1]) if tells.any() else tells
    halves = [tells & ~is_above, tells & is_above]
    if min(half.sum() for half in halves) < LEAST_OF_HALF:
        return False
    low, high = (LeastSquares(columns[half], values[half]).coefficients[0] for half in halves)
    return bool(abs(low - high) <= HALVES_AGREE * max(abs(low), abs(high)))


def _sampled_from(surprise: Floats) -> str:
    """log pi + H has mean 0 over tokens that were sampled from pi itself."""
    mean, error = surprise.mean(), np.std(surprise) / np.sqrt(surprise.size)
    if abs(mean) <= 4 * error:
        return "the tokens are as likely as if sampled from pi, so the engine's log-probs lack what sampling applied"
    return f"the tokens were sampled from a {'sharper' if mean > 0 else 'flatter'} distribution than pi"


COLUMNS = {
    "log_pi": "The training path's log-probs",
    "log_mu": "The engine's log-probs",
    "both": "The log-probs of both sides",
}


@SIGNATURES.of(Code.OTHER_BASE)
def other_base(disagreement: Disagreement) -> Cause | None:
    """The cause where one side is proportional to the other by the logarithm of a base, or both are to pi's entropy."""
    pair = disagreement.pair
    sums = BaseSums.of(pair.log_pi, pair.log_mu)
    base = sums.base
    if base is not None:
        return _other_base(base, _of_sides(sums, base))
    if pair.entropy_pi is None:
        return None
    base = base_of_entropies(pair.log_pi, pair.entropy_pi)
    if base is None or base.column != "both":
        return None
    return _other_base(base, _of_both(pair))


def _other_base(base: OtherBase, evidence: str) -> Cause:
    is_both = base.column == "both"
    return Cause.of(
        Code.OTHER_BASE,
        [evidence],
        column=COLUMNS[base.column],
        base=base.name,
        number=base.base,
        nats=base.nats,
        or_entropies="; where they are natural, it is the entropies that are in another unit" if is_both else "",
    )


def _of_sides(sums: BaseSums, base: OtherBase) -> str:
    what = (
        f"1/ln {base.base} is {1 / base.nats:.4f}" if base.column == "log_pi" else f"ln {base.base} is {base.nats:.4f}"
    )
    return (
        f"log pi is {sums.slope(base):.4f} times log mu, where {what}, and near it in "
        f"{write_percent(sums.near_share(base))} of the tokens that neither side is sure of: a temperature or a cut "
        "vocabulary moves each context otherwise"
    )


def _of_both(pair: TokenPair) -> str:
    assert pair.entropy_pi is not None
    surprisal = -float(np.mean(pair.log_pi, dtype=np.float64))
    entropy = float(np.mean(pair.entropy_pi, dtype=np.float64))
    times = surprisal / entropy if entropy > 0 else math.inf
    return (
        f"-log pi is {write_number(surprisal)} on average and pi's entropy {write_number(entropy)}: {times:.3g} times, "
        "for sure and for unsure tokens alike, where tokens drawn from pi have the same mean"
    )
