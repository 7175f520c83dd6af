"""Responses scored with, or joined to, another response: all or nothing per response, and an exchange restores it."""

from typing import Final

from mismatch_probe.notation import write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.partners import PartnerTotals
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

RESTORED_FLOORS: Final = 5.0
"""Largest rms deviation from the true partner, in floors, where a reference measured one."""


def mispaired(disagreement: Disagreement) -> Cause | None:
    """The cause where the responses that disagree fit other responses' scores."""
    if disagreement.is_rounding:
        return None
    has_floor = disagreement.pair.log_ref is not None
    most = RESTORED_FLOORS * disagreement.floor if has_floor else None
    found = PartnerTotals.of(disagreement.pair, 10 * disagreement.floor, most)
    if not found.are_exchanged:
        return None
    total = disagreement.pair.sequences.num_sequences
    return Code.MISPAIRED.cause(
        count=int(found.off),
        total=total,
        evidence=[
            f"{write_percent(found.share)} of the responses that disagree fit scores of another one",
            f"the other {total - int(found.off)} responses agree",
        ],
        advice=["Join both sides by a response id, not by order; look for a sort, a shuffle or a drop between them."],
    )
