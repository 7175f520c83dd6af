"""Causes in the number format: one side computes or writes in another.

Each side's error is a multiple of its format's unit roundoff, and the multiple is nearly the same on both sides of one
checkpoint. A side whose error is off by the ratio of two formats runs in the other one.

Rounded numbers lie on the format's grid: they are exact in it, but for a few that something wrote over. Of numbers
computed in FP32 one in thousands does. A side most of whose numbers are exact was rounded too, whatever the others are.
"""

from collections.abc import Iterator

import numpy as np

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype
from mismatch_probe.notation import write_number, write_percent, write_share
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Reals, TokenPair
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.profile import Disagreement

LEAST_OCTAVES = 2.0
"""Two right sides of one format differ by less than this factor of 4; FP16 and BF16 lie 3 octaves apart."""

BELOW_ROUNDING = 0.05
"""In units of the format, an error of the uncertain tokens that no chain of roundings stays below."""

LEAST_UNCERTAIN = 64
"""Tokens whose errors are compared: the medians of a handful lie a factor of 4 apart by chance in one run of twenty."""

TINY = 1e-300
MATCH_OCTAVES = 1.5
"""How near the ratio must come to that of two formats."""

FP32_OCTAVES = 8.0
"""An error this far below what 16 bits give is that of FP32, whose own size is set by how log-probs are stored."""


def one_sided_dtype(disagreement: Disagreement) -> Cause | None:
    """The cause where the errors' ratio is that of another format than was asked for.

    Between 16-bit formats the ratio is only read once FP32 has shown that no bug is there to make it.
    """
    if disagreement.errors is None or not (disagreement.train_dtype.is_16_bit and disagreement.infer_dtype.is_16_bit):
        return None
    if disagreement.uncertain.sum() < LEAST_UNCERTAIN:
        return None
    median_pi, median_mu = disagreement.errors
    rounds_pi, rounds_mu = (
        median_pi / disagreement.train_dtype.round_off,
        median_mu / disagreement.infer_dtype.round_off,
    )
    octaves = _octaves(rounds_pi, rounds_mu)
    if abs(octaves) < LEAST_OCTAVES:
        return None
    too_exact = min(rounds_pi, rounds_mu) < BELOW_ROUNDING
    for what, expected in _alternatives(disagreement.train_dtype, disagreement.infer_dtype):
        if abs(expected) >= FP32_OCTAVES:
            matches = too_exact and abs(octaves) >= FP32_OCTAVES and expected * octaves > 0
        else:
            matches = disagreement.formats_alone and abs(octaves - expected) <= MATCH_OCTAVES
        if matches:
            return Code.ONE_SIDED_DTYPE.cause(
                what=what,
                evidence=[
                    f"median error against the reference: training path {write_number(median_pi)}, engine "
                    f"{write_number(median_mu)} nats; asked for {disagreement.train_dtype} and "
                    f"{disagreement.infer_dtype}",
                ],
                advice=[
                    "Read back which format really multiplies on that side: autocast, a cast at load, quantisation."
                ],
            )
    return None


def _alternatives(train: Dtype, infer: Dtype) -> Iterator[tuple[str, int]]:
    """What may run instead, and the octaves by which the errors' ratio then misses the expected one."""
    for dtype in (*SIXTEEN_BIT, Dtype.FP32):
        if dtype != train:
            yield (
                f"the training path's error is that of {dtype}, not {train}",
                train.significand_bits - dtype.significand_bits,
            )
        if dtype != infer:
            yield f"the engine's error is that of {dtype}, not {infer}", dtype.significand_bits - infer.significand_bits


def _octaves(first: float, second: float) -> float:
    return float(np.log2(max(first, TINY)) - np.log2(max(second, TINY)))


LEAST_TOKENS = 200
LEAST_OF_ROUNDED = 0.99
MOST_OF_OTHER = 0.5
"""Shares of a side's log-probs that are exact in the format: of a rounded side, and of one that was not rounded."""
COARSEST_FIRST = sorted(SIXTEEN_BIT, key=lambda dtype: dtype.significand_bits)
"""A log-prob that is exact in BF16 is exact in FP16 too."""


def rounded_logprobs(disagreement: Disagreement) -> Cause | None:
    """The cause where nearly all log-probs of one side lie on the grid of a 16-bit format, and few of the other's."""
    pair = disagreement.pair
    legs = {"training path": pair.log_pi, "engine": pair.log_mu}
    for dtype in COARSEST_FIRST:
        shares = {side: grid_share(leg, dtype) for side, leg in legs.items()}
        (other, least), (rounded, most) = sorted(shares.items(), key=lambda one: one[1])
        if most >= LEAST_OF_ROUNDED and 0 <= least <= MOST_OF_OTHER:
            return Code.ONE_SIDED_DTYPE.cause(
                what=f"the {rounded}'s log-probs are rounded to {dtype}",
                evidence=[
                    f"{write_share(most, 1)} of the log-probs of the {rounded} are exact in {dtype}, and "
                    f"{write_share(least, 1)} of those of the {other}",
                    f"mean d {write_number(float(pair.diff.mean()))} nats",
                    f"writing them in {dtype} explains at most {write_percent(_explained(pair, legs[rounded], dtype))} "
                    f"of the sum of abs(d): the rest has another cause, or the log-softmax itself ran in {dtype}",
                ],
                advice=["Compute log-softmax in FP32 on both sides, and keep log-probs in FP32 on the way."],
            )
    return None


def _explained(pair: TokenPair, rounded: Reals, dtype: Dtype) -> float:
    """The share of the sum of abs(d) that half a step of the format makes at most."""
    total = float(pair.abs_diff.sum())
    return float(np.minimum(pair.abs_diff, dtype.round_off * np.abs(rounded)).sum()) / total if total else 1.0


def grid_share(log_probs: Reals, dtype: Dtype) -> float:
    """The share of the log-probs below 0 that are exact in a 16-bit format; -1 for too few to tell."""
    values = np.asarray(log_probs[log_probs != 0], dtype=np.float32)
    if values.size < LEAST_TOKENS:
        return -1.0
    if dtype == Dtype.BF16:
        return float((values.view(np.uint32) & 0xFFFF == 0).mean())
    with np.errstate(over="ignore"):
        return float((values.astype(np.float16).astype(np.float32) == values).mean())


def is_on_grid(log_probs: Reals, dtype: Dtype) -> bool:
    """Whether every log-prob is exact in a 16-bit format; False for too few to tell."""
    return grid_share(log_probs, dtype) == 1
