"""One test a cause: what it looks like in the data, and whether this pair looks like it."""

from collections.abc import Callable

from mismatch_probe.errors import noted
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.label_offset import label_offset
from mismatch_probe.verdict.signatures.mispaired import mispaired
from mismatch_probe.verdict.signatures.not_repeatable import not_repeatable
from mismatch_probe.verdict.signatures.other_base import other_base
from mismatch_probe.verdict.signatures.positions import positions
from mismatch_probe.verdict.signatures.prompt_prefix import prompt_prefix
from mismatch_probe.verdict.signatures.rounded_logprobs import rounded_logprobs
from mismatch_probe.verdict.signatures.sampled_otherwise import sampled_otherwise
from mismatch_probe.verdict.signatures.stale_weights import stale_weights
from mismatch_probe.verdict.signatures.temperature import temperature
from mismatch_probe.verdict.signatures.truncated_support import truncated_support

Signature = Callable[[Disagreement], Cause | None]
"""Raises nothing on data that `compare` hands over; what it raises nonetheless names it (`errors.noted`)."""

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
