"""What makes the numbers of a pair void, whatever they say: fail closed, most serious first."""

from collections.abc import Iterator

from mismatch_probe.notation import write_many
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.ids import ids_cause

SIDES = ("the training path", "the engine")


def data_faults(case: Case) -> Iterator[Cause]:
    """Every reason not to trust the pair; none for sound data."""
    yield from case.log_faults
    counts = case.counts
    asked = (case.train_dtype, case.infer_dtype)
    for side, wanted, applied in zip(SIDES, asked, (case.applied_train, case.applied_infer), strict=True):
        if applied != wanted:
            yield Code.DTYPE_NOT_APPLIED.cause(
                [f"asked for {wanted}, read back {applied}"],
                [f"Find what overrides the dtype of {side} (a quantisation setting or the checkpoint's own config)."],
                asked=wanted,
                side=side,
                applied=applied or "an unknown dtype",
            )
    tokens = write_many(counts.num_tokens, "token")
    left = f"left to measure: {write_many(counts.num_sequences, 'response')} with {tokens}"
    advice = "Numbers below describe the usable responses only; do not act on them before this is mended."
    if case.ids is not None:
        cause = ids_cause(case.ids)
        yield cause.model_copy(update={"evidence": [*cause.evidence, left], "advice": [*cause.advice, advice]})
    elif counts.mismatched_ids:
        yield Code.IDS_DIFFER.cause([left], [advice], count=counts.mismatched_ids)
    in_part = counts.is_measured_in_part
    for code, of_pi, of_mu in (
        (Code.MISSING_LOGPROBS, counts.missing_pi, counts.missing_mu),
        (Code.NONFINITE, counts.nonfinite_pi, counts.nonfinite_mu),
        (Code.POSITIVE_LOGPROBS, counts.positive_pi, counts.positive_mu),
    ):
        for side, count in zip(SIDES, (of_pi, of_mu), strict=True):
            if count and not (in_part and code is Code.MISSING_LOGPROBS):
                yield code.cause([left], [advice], count=count, side=side)
    if counts.void_checks and not in_part:
        yield Code.VOID_CHECKS.cause([left], [advice], count=counts.void_checks)
    if not counts.num_tokens:
        yield Code.NO_DATA.cause(
            advice=["Check that the model generates text for these prompts (--max-new-tokens, the chat template)."]
        )
