"""One test a cause: what it looks like in the data, and whether this pair looks like it."""

from typing import Protocol

from mismatch_probe.errors import noted
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.signatures.context import positions, prompt_prefix
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import label_offset, mispaired, rounded_logprobs
from mismatch_probe.verdict.signatures.sampling import other_base, sampled_otherwise, temperature, truncated_support
from mismatch_probe.verdict.signatures.weights import not_repeatable, stale_weights


class Signature(Protocol):
    """What a cause must offer: a function of a pair's data that is in one of the two tuples below.

        def mine(disagreement: Disagreement) -> Cause | None:
            share = ...
            if share < 0.5:
                return None
            return Cause(code=Code.MINE, sentence="...", evidence=[f"{write_percent(share)} of the tokens ..."])

    It raises nothing on data that `compare` hands over; what it raises nonetheless names it (`errors.noted`).
    """

    __name__: str

    def __call__(self, disagreement: Disagreement, /) -> Cause | None: ...


DISTINCT: tuple[Signature, ...] = (
    other_base,
    label_offset,
    mispaired,
    truncated_support,
    rounded_logprobs,
    temperature,
    not_repeatable,
    sampled_otherwise,
)
"""Shapes that rounding cannot take, in the order in which one hides those after it."""

SHAPED: tuple[Signature, ...] = (positions, prompt_prefix, stale_weights)
"""Told apart by where in the context the deviation lies, once it is settled that there is a bug."""


def signatures(disagreement: Disagreement) -> list[Cause]:
    """The foremost cause that this pair's data shows, or none."""
    for test in (*DISTINCT, *SHAPED):
        with noted(f"the rule {test.__name__}"):
            cause = test(disagreement)
        if cause is not None:
            return [cause]
    return []
