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
from mismatch_probe.stats.sequences import Reals, TokenPair
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code

LEAST_TOKENS: Final = 32
CERTAIN_NATS: Final = 1e-3
"""Log-probs nearer to 0 are the same on both sides without being a copy."""

_SIDES: Final = ("pi", "mu")
_NAMES: Final = {"pi": "the training path", "mu": "the engine"}


def equal_tokens(pair: TokenPair) -> int:
    """Response tokens of a pair whose log-probs are equal bit for bit on both sides; 0 where one is not, or where too
    few are below certainty to tell.
    """
    return int(pair.log_mu.size) if _are_equal(pair.log_pi, pair.log_mu) else 0


def _are_equal(leg: Reals, other: Reals) -> bool:
    """Bit for bit, or once both are rounded to FP32, as a copy is that was written in it."""
    return int((other < -CERTAIN_NATS).sum()) >= LEAST_TOKENS and np.array_equal(
        leg.astype(np.float32), other.astype(np.float32)
    )


def is_copy(pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, say_whose_they_are: bool) -> bool:
    """Whether the pair's legs are taken for one and its copy."""
    return bool(not say_whose_they_are and any(dtype.is_16_bit for dtype in dtypes) and equal_tokens(pair))


def source_of_reference(pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, say_whose_they_are: bool) -> str | None:
    """The side whose 16-bit log-probs the reference holds bit for bit, `pi` or `mu`; None where it is no copy.

    A reference in FP32 rounds otherwise than 16 bits do. dtypes: of pi and of mu.
    """
    if say_whose_they_are or pair.log_ref is None:
        return None
    legs = zip(_SIDES, (pair.log_pi, pair.log_mu), dtypes, strict=True)
    return next((side for side, leg, dtype in legs if dtype.is_16_bit and _are_equal(pair.log_ref, leg)), None)


def copied_leg(case: Case) -> Iterator[Cause]:
    """The reason not to trust a pair that may be one leg twice."""
    if case.disagreement is None:
        return
    dtypes, pair = (case.train_dtype, case.infer_dtype), case.disagreement.pair
    if is_copy(pair, dtypes, say_whose_they_are=case.legs_say_whose_they_are):
        yield Code.COPIED_LEG.cause(
            ["neither leg says which side of which run it is, as those of this version do"],
            ["Run the comparison again with this version: legs that say whose they are may be equal."],
            legs="The two sides",
            count=write_count(equal_tokens(pair)),
        )
        return
    side = source_of_reference(pair, dtypes, say_whose_they_are=case.legs_say_whose_they_are)
    if side is not None:
        yield Code.COPIED_LEG.cause(
            [f"FP32 rounds otherwise than {dtypes[_SIDES.index(side)].upper()}, so no reference can equal that side"],
            [
                "Leave the reference out (a log: import it without --ref-is-fp32), or record that of the same policy "
                "in FP32; if the side itself computed in FP32, give that as its dtype."
            ],
            legs=f"The reference and {_NAMES[side]}",
            count=write_count(pair.log_mu.size),
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
