"""One side computes in another format than the run says, against the reference.

Each side's error is a multiple of its format's unit roundoff, and the multiple is nearly the same on both sides of one
checkpoint. A side whose error is off by the ratio of two formats runs in the other one.
"""

from collections.abc import Iterator

import numpy as np

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype
from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

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
