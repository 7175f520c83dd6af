"""Two legs that hold the same numbers bit for bit: one may be a copy of the other.

Kernels that are bitwise the same on both sides, as some on-policy trainers have, do give that, also in 16 bit. It is
believed, and said, where every leg says which side of which run it is. Where the legs say nothing, a 16-bit pair is
taken for a copy; an FP32 pair, whose sides are meant to agree, is believed, and what the legs lack is said.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_count
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code

LEAST_TOKENS: Final = 32
CERTAIN_NATS: Final = 1e-3
"""Log-probs nearer to 0 are the same on both sides without being a copy."""


def equal_tokens(pair: TokenPair) -> int:
    """Response tokens of a pair whose log-probs are equal bit for bit on both sides; 0 where one is not, or where too
    few are below certainty to tell.
    """
    telling = int((pair.log_mu < -CERTAIN_NATS).sum())
    if telling < LEAST_TOKENS or not np.array_equal(pair.log_pi, pair.log_mu):
        return 0
    return int(pair.log_mu.size)


def is_copy(pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, say_whose_they_are: bool) -> bool:
    """Whether the pair's legs are taken for one and its copy."""
    return bool(not say_whose_they_are and any(dtype.is_16_bit for dtype in dtypes) and equal_tokens(pair))


def copied_leg(case: Case) -> Iterator[Cause]:
    """The reason not to trust a pair that may be one leg twice."""
    dtypes = (case.train_dtype, case.infer_dtype)
    if case.disagreement is not None and is_copy(
        case.disagreement.pair, dtypes, say_whose_they_are=case.legs_say_whose_they_are
    ):
        yield Code.COPIED_LEG.cause(
            ["neither leg says which side of which run it is, as those of this version do"],
            ["Run the comparison again with this version: legs that say whose they are may be equal."],
            count=write_count(equal_tokens(case.disagreement.pair)),
        )


def with_equal_legs(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what is to be known where the sides are equal bit for bit."""
    count = 0 if case.disagreement is None else equal_tokens(case.disagreement.pair)
    if not count or verdict.kind == "broken":
        return verdict
    how = (
        "each leg says that it was computed by its own side"
        if case.legs_say_whose_they_are
        else "and no leg says which side computed it, so that one may be a copy"
    )
    said = f"both sides are equal bit for bit in all {write_count(count)} tokens, as the same kernels give: {how}"
    return verdict.model_copy(update={"evidence": [*verdict.evidence, said]})
