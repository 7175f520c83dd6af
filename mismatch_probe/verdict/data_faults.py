"""What makes the numbers of a pair void, most serious first: missing data, copied legs.

Kernels that are bitwise the same on both sides, as some on-policy trainers have, do give that, also in 16 bit. It is
believed, and said, where every leg says which side of which run it is. Where the legs say nothing, a 16-bit pair is
taken for a copy; an FP32 pair, whose sides are meant to agree, is believed, and what the legs lack is said.
"""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.causes.comparison import USABLE_ONLY, Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_count, write_many, write_share
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.copies import CERTAIN_NATS, CopyTotals
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.case import Case, ids_cause

SIDES = ("the training path", "the engine")


def data_faults(case: Case) -> Iterator[Cause]:
    """Every reason not to trust the pair; none for sound data."""
    yield from case.log_faults
    counts = case.counts
    settings = (case.train_dtype, case.infer_dtype)
    for side, wanted, applied in zip(SIDES, settings, (case.applied_train, case.applied_infer), strict=True):
        if applied != wanted:
            yield Cause.of(
                Code.DTYPE_NOT_APPLIED,
                [f"asked for {wanted}, read back {applied}"],
                wanted=wanted,
                side=side,
                applied=applied or "an unknown dtype",
            )
    tokens = write_many(counts.num_tokens, "token")
    usable = f"left to measure: {write_many(counts.num_sequences, 'response')} with {tokens}"
    if case.ids is not None:
        cause = ids_cause(case.ids)
        yield cause.model_copy(update={"evidence": [*cause.evidence, usable], "advice": [*cause.advice, USABLE_ONLY]})
    elif counts.mismatched_ids:
        yield Cause.of(Code.IDS_DIFFER, [usable], [USABLE_ONLY], count=counts.mismatched_ids)
    in_part = counts.is_measured_in_part
    for code, of_pi, of_mu in (
        (Code.MISSING_LOGPROBS, counts.missing_pi, counts.missing_mu),
        (Code.NONFINITE, counts.nonfinite_pi, counts.nonfinite_mu),
        (Code.POSITIVE_LOGPROBS, counts.positive_pi, counts.positive_mu),
    ):
        for side, count in zip(SIDES, (of_pi, of_mu), strict=True):
            if count and not (in_part and code is Code.MISSING_LOGPROBS):
                yield Cause.of(code, [usable], count=count, side=side)
    if counts.void_checks and not in_part:
        yield Cause.of(Code.VOID_CHECKS, [usable], count=counts.void_checks)
    if not counts.num_tokens:
        yield Cause.of(Code.NO_DATA)


_SIDES: Final = ("pi", "mu")
_NAMES: Final = {"pi": "the training path", "mu": "the engine"}


def where_equal(copies: CopyTotals) -> str:
    """`at 600 of 632 tokens below -0.01 (94 %)`: where two columns are equal bit for bit, of the tokens that tell."""
    telling, equal = int(copies.telling), int(copies.equal)
    tokens = f"{write_count(telling)} tokens below -{CERTAIN_NATS:g}"
    if equal == telling:
        return f"at all {tokens}"
    return f"at {write_count(equal)} of {tokens} ({write_share(equal, telling)})"


def copy_of(pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, are_identified: bool) -> CopyTotals | None:
    """Where the pair's legs are equal, if they are taken for one and its copy; else None. dtypes: of pi and of mu."""
    if are_identified or not any(dtype.rounds_coarsely for dtype in dtypes):
        return None
    copies = CopyTotals.of(pair.log_pi, pair.log_mu)
    return copies if copies.is_copy else None


def source_of_reference(
    pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, are_identified: bool
) -> tuple[str, CopyTotals] | None:
    """The side whose 16-bit log-probs the reference holds, `pi` or `mu`, and where; None where it is no copy.

    A reference in FP32 rounds otherwise than 16 bits do. dtypes: of pi and of mu.
    """
    if are_identified or pair.log_ref is None:
        return None
    for side, leg, dtype in zip(_SIDES, (pair.log_pi, pair.log_mu), dtypes, strict=True):
        copies = CopyTotals.of(pair.log_ref, leg)
        if dtype.rounds_coarsely and copies.is_copy:
            return side, copies
    return None


def copied_leg(case: Case) -> Iterator[Cause]:
    """The reason not to trust a pair that may be one leg twice."""
    if case.disagreement is None:
        return
    dtypes, pair = (case.train_dtype, case.infer_dtype), case.disagreement.pair
    copies = copy_of(pair, dtypes, are_identified=case.legs_are_identified)
    if copies is not None:
        yield Cause.of(
            Code.COPIED_LEG,
            ["neither leg says which side of which run it is, as those of this version do"],
            legs="The two sides",
            where=where_equal(copies),
        )
        return
    source = source_of_reference(pair, dtypes, are_identified=case.legs_are_identified)
    if source is not None:
        side, copies = source
        yield Cause.of(
            Code.COPIED_LEG,
            [f"FP32 rounds otherwise than {dtypes[_SIDES.index(side)].upper()}, so no reference can equal that side"],
            [
                "Leave the reference out (a log: import it without --ref-is-fp32), or record that of the same policy "
                "in FP32; if the side itself computed in FP32, give that as its dtype."
            ],
            legs=f"The reference and {_NAMES[side]}",
            where=where_equal(copies),
        )


def with_equal_legs(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what is to be known where the sides are equal bit for bit."""
    if case.disagreement is None or verdict.kind == "broken":
        return verdict
    copies = CopyTotals.of(case.disagreement.pair.log_pi, case.disagreement.pair.log_mu)
    if not copies.is_copy:
        return verdict
    how = (
        "each leg says that it was computed by its own side"
        if case.legs_are_identified
        else "and no leg says which side computed it, so that one may be a copy"
    )
    shown = f"both sides are equal bit for bit {where_equal(copies)}, as the same kernels give: {how}"
    return verdict.model_copy(update={"evidence": [*verdict.evidence, shown]})
