"""Causes in what is recorded: another number format, rounded log-probs, shifted labels, responses exchanged.

Each side's error is a multiple of its format's unit roundoff, and the multiple is nearly the same on both sides of one
checkpoint. A side whose error is off by the ratio of two formats runs in the other one.

Rounded numbers lie on the format's grid: they are exact in it, but for a few that something wrote over. Of numbers
computed in FP32 one in thousands does. A side most of whose numbers are exact was rounded too, whatever the others are.

Either recorded log-probs agree with the other side's once shifted, or (logits read at the wrong position) the arg-max
tokens do although the log-probs belong to no token that was asked for. Or a side scores tokens that nobody sampled: its
log-probs have nothing to do with the other side's, and lie far below its own entropy, which the other side keeps to.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import COARSE, COARSEST_FIRST, Dtype
from mismatch_probe.notation import write_number, write_percent, write_share
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.pair_totals import PartnerTotals
from mismatch_probe.stats.sequences import Array, Mask, Reals, TokenPair, difference
from mismatch_probe.verdict.signatures.profile import SIGNATURES, Disagreement, root_mean_square

LEAST_OCTAVES = 2.0
"""Two right sides of one format differ by less than this factor of 4; FP16 and BF16 differ by 3 octaves."""

BELOW_ROUNDING = 0.05
"""The least error of the uncertain tokens, in units of the format, that a chain of roundings makes."""

LEAST_UNCERTAIN = 64
"""Tokens whose errors are compared: the medians of a handful differ by a factor of 4 by chance in one run of twenty."""

TINY = 1e-300
MATCH_OCTAVES = 1.5
"""How near the ratio must come to that of two formats."""

FP32_OCTAVES = 8.0
"""An error this far below what 16 bits give is that of FP32, whose own size is set by how log-probs are stored."""


def one_sided_dtype(disagreement: Disagreement) -> Cause | None:
    """The cause where the errors' ratio is that of another format than was asked for.

    Between 16-bit formats the ratio is only read once FP32 has shown that no bug is there to make it.
    """
    if disagreement.errors is None or not (
        disagreement.train_dtype.rounds_coarsely and disagreement.infer_dtype.rounds_coarsely
    ):
        return None
    if disagreement.uncertain.sum() < LEAST_UNCERTAIN:
        return None
    median_pi, median_mu = disagreement.errors
    rounds_pi, rounds_mu = (
        median_pi / disagreement.train_dtype.round_off,
        median_mu / disagreement.infer_dtype.round_off,
    )
    octaves = float(np.log2(max(rounds_pi, TINY)) - np.log2(max(rounds_mu, TINY)))
    if abs(octaves) < LEAST_OCTAVES:
        return None
    too_exact = min(rounds_pi, rounds_mu) < BELOW_ROUNDING
    for what, expected_dtype in _alternatives(disagreement.train_dtype, disagreement.infer_dtype):
        if abs(expected_dtype) >= FP32_OCTAVES:
            matches = too_exact and abs(octaves) >= FP32_OCTAVES and expected_dtype * octaves > 0
        else:
            matches = disagreement.formats_alone and abs(octaves - expected_dtype) <= MATCH_OCTAVES
        if matches:
            return Cause.of(
                Code.ONE_SIDED_DTYPE,
                what=what,
                evidence=[
                    f"median error against the reference: training path {write_number(median_pi)}, engine "
                    f"{write_number(median_mu)} nats; asked for {disagreement.train_dtype} and "
                    f"{disagreement.infer_dtype}"
                ],
            )
    return None


def _alternatives(train: Dtype, infer: Dtype) -> Iterator[tuple[str, int]]:
    """What may run instead, and the octaves by which the errors' ratio then misses the expected one."""
    for dtype in (*COARSE, Dtype.FP32):
        if dtype != train:
            yield (
                f"the training path's error is that of {dtype}, not {train}",
                train.significand_bits - dtype.significand_bits,
            )
        if dtype != infer:
            yield f"the engine's error is that of {dtype}, not {infer}", dtype.significand_bits - infer.significand_bits


LEAST_UNSURE_TOKENS = 32
LEAST_UNSURE_NATS = 0.03
"""How far below 0 a log-prob must lie to show a grid: nearer to 0 those of FP32 are exact in 16 bits too, for they are
differences of logits, which FP32 holds to a millionth of a nat.
"""
LEAST_OF_ROUNDED = 0.99
MOST_OF_OTHER = 0.5
"""Shares of a side's log-probs that are exact in the format: of a rounded side, and of one that was not rounded."""


@SIGNATURES.of((Code.ONE_SIDED_DTYPE, "grid"))
def rounded_logprobs(disagreement: Disagreement) -> Cause | None:
    """The cause where nearly all log-probs of one side lie on the grid of a 16-bit format, and few of the other's."""
    pair = disagreement.pair
    legs = {"training path": pair.log_pi, "engine": pair.log_mu}
    for dtype in COARSEST_FIRST:
        shares = {side: grid_share(leg, dtype) for side, leg in legs.items()}
        (other, least), (rounded_side, most) = sorted(shares.items(), key=lambda item: item[1])
        if most >= LEAST_OF_ROUNDED and 0 <= least <= MOST_OF_OTHER:
            explained_share = write_percent(_share_explained(pair, legs[rounded_side], dtype))
            return Cause.of(
                Code.ONE_SIDED_DTYPE,
                variant="grid",
                what=f"the {rounded_side}'s log-probs are rounded to {dtype}",
                evidence=[
                    f"{write_share(most, 1)} of the log-probs of the {rounded_side} are exact in {dtype}, and "
                    f"{write_share(least, 1)} of those of the {other}, where a token is not nearly sure",
                    f"mean d {write_number(float(pair.diff.mean()))} nats",
                    f"writing them in {dtype} explains at most {explained_share} "
                    f"of the sum of abs(d): the rest has another cause, or the log-softmax itself ran in {dtype}",
                ],
            )
    return None


def _share_explained(pair: TokenPair, rounded_leg: Reals, dtype: Dtype) -> float:
    """The share of the sum of abs(d) that half a step of the format makes at most."""
    total = float(pair.abs_diff.sum())
    return float(np.minimum(pair.abs_diff, dtype.round_off * np.abs(rounded_leg)).sum()) / total if total else 1.0


def grid_share(log_probs: Reals, dtype: Dtype) -> float:
    """The share of the log-probs of unsure tokens that are exact in a format; -1 for too few values."""
    values = np.asarray(log_probs[np.abs(log_probs) >= LEAST_UNSURE_NATS], dtype=np.float32)
    return float(_are_exact(values, dtype).mean()) if values.size >= LEAST_UNSURE_TOKENS else -1.0


def _are_exact(values: Reals, dtype: Dtype) -> Mask:
    """Which numbers, none of them 0, the format holds as they are: multiples of its spacing there, within its range."""
    _, exponents = np.frexp(values)
    spacings = np.ldexp(values, dtype.significand_bits - np.maximum(exponents, dtype.least_exponent))
    return np.asarray((np.rint(spacings) == spacings) & (np.abs(values) <= dtype.largest) | np.isinf(values))


def is_on_grid(log_probs: Reals, dtype: Dtype) -> bool:
    """Whether every log-prob is exact in a format; False for too few values."""
    below_zero = np.asarray(log_probs[log_probs != 0], dtype=np.float32)
    return grid_share(log_probs, dtype) == 1 and bool(_are_exact(below_zero, dtype).all())


RESTORED_FLOORS: Final = 5.0
"""Largest rms deviation from the true partner, in floors, where a reference measured one."""


@SIGNATURES.of(Code.MISPAIRED)
def mispaired_rows(disagreement: Disagreement) -> Cause | None:
    """The cause where the responses that disagree fit other responses' scores."""
    if disagreement.is_rounding:
        return None
    has_floor = disagreement.pair.log_ref is not None
    most = RESTORED_FLOORS * disagreement.floor if has_floor else None
    partners = PartnerTotals.of(disagreement.pair, 10 * disagreement.floor, most)
    if not partners.are_exchanged:
        return None
    total = disagreement.pair.sequences.num_sequences
    return Cause.of(
        Code.MISPAIRED,
        count=int(partners.off),
        total=total,
        evidence=[
            f"{write_percent(partners.share)} of the responses that disagree fit scores of another one",
            f"the other {total - int(partners.off)} responses agree",
        ],
    )


SHIFTS = (-2, -1, 1, 2)

RESTORED_BY_SHIFT = 0.25
"""Of the rms of d, the most that may be left after the shift."""

RESTORED_SHARE = 0.75
"""Of the uncertain tokens, the least that the shift must bring closer: one wild token at an edge makes an rms alone."""

LEAST_COMPARED = 32
"""Tokens whose log-probs are correlated."""

LEAST_OF_A_SHIFT = 8
"""Uncertain tokens that are compared: one or two come closer by chance."""

TOP1_RESTORED = 0.9
TOP1_LOST = 0.6
"""Shares of positions with equal arg-max tokens: at least with the shift, at most without."""

UNLIKE = 0.2
"""Correlation of the two sides' probabilities, the most that those of other tokens have."""

SURPRISED_NATS = 1.0
"""By which the tokens are less likely than the entropy says, the least."""

KEPT_TO = 0.25
"""Of that surprise, the most by which the other side's log-probs may miss the entropy."""

FOLLOWS = (0.5, 1.5)
"""Slope of -log mu over the entropy of the same token: 1 where the tokens were drawn from these distributions."""


@SIGNATURES.of(Code.LABEL_OFFSET)
def label_offset(disagreement: Disagreement) -> Cause | None:
    """The cause where a shift within each response restores agreement."""
    if disagreement.is_rounding:
        return None
    pair = disagreement.pair
    for shift in SHIFTS:
        places, neighbours = pair.sequences.neighbours(shift)
        rest = difference(pair.log_pi[neighbours], pair.log_mu[places])
        closer = (np.abs(rest) < pair.abs_diff[places])[disagreement.uncertain[places]]
        comes_closer = closer.size >= LEAST_OF_A_SHIFT and closer.mean() >= RESTORED_SHARE
        if comes_closer and root_mean_square(rest) <= RESTORED_BY_SHIFT * disagreement.rms:
            evidence = [
                f"shifting one side by {shift:+d} takes the rms deviation from {write_number(disagreement.rms)} to "
                f"{write_number(root_mean_square(rest))} nats and brings {write_percent(closer.mean())} of the "
                "uncertain tokens closer"
            ]
            return Cause.of(Code.LABEL_OFFSET, evidence, shift=shift)
    if pair.top1_pi is None or pair.top1_mu is None:
        return _other_tokens(pair)
    equal = _share_equal(pair.top1_pi, pair.top1_mu)
    for shift in SHIFTS:
        places, neighbours = pair.sequences.neighbours(shift)
        restored_share = _share_equal(pair.top1_pi[neighbours], pair.top1_mu[places])
        if equal <= TOP1_LOST and restored_share >= TOP1_RESTORED:
            evidence = [
                f"arg-max tokens agree at {write_percent(equal)} of positions, and at {write_percent(restored_share)} "
                f"when shifted by {shift:+d}"
            ]
            return Cause.of(Code.LABEL_OFFSET, evidence, shift=shift)
    return _other_tokens(pair)


def _other_tokens(pair: TokenPair) -> Cause | None:
    """The cause where the tokens that pi scores are not those that mu sampled; None without pi's entropy.

    pi's distributions are known to be right by their entropy, to which the sampled tokens keep, each to its own.
    """
    if pair.entropy_pi is None or pair.sequences.num_tokens < LEAST_COMPARED:
        return None
    entropies = pair.entropy_pi.astype(np.float64)
    entropy = float(entropies.mean())
    of_pi, of_mu = (-float(leg.mean(dtype=np.float64)) for leg in (pair.log_pi, pair.log_mu))
    surprise = of_pi - entropy
    if surprise < SURPRISED_NATS or abs(of_mu - entropy) > KEPT_TO * surprise:
        return None
    prob_pi, prob_mu = (np.exp(leg.astype(np.float64)) for leg in (pair.log_pi, pair.log_mu))
    if not (prob_pi.std() and prob_mu.std() and entropies.std()):
        return None
    correlation = float(np.corrcoef(prob_pi, prob_mu)[0, 1])
    slope = float(np.cov(-pair.log_mu.astype(np.float64), entropies)[0, 1] / entropies.var(ddof=1))
    if correlation > UNLIKE or not FOLLOWS[0] < slope < FOLLOWS[1]:
        return None
    return Cause.of(
        Code.LABEL_OFFSET,
        variant="other_tokens",
        evidence=[
            f"the two sides' probabilities have a correlation of {write_number(correlation)}",
            f"the training path finds the tokens {write_number(of_pi)} nats unlikely on average and the engine "
            f"{write_number(of_mu)}, where the training path's own entropy is {write_number(entropy)}",
        ],
    )


def _share_equal(first: Array, second: Array) -> float:
    return float(np.mean(first == second)) if first.size else 0.0
