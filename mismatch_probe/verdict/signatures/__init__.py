"""One test a cause: what it looks like in the data, and whether this pair looks like it."""

from typing import Final

from mismatch_probe.errors import note_in_error
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.signatures import context, places, recording, sampling, weights
from mismatch_probe.verdict.signatures.profile import SIGNATURES, Disagreement, Signature

__all__ = ["MODULES", "Signature", "signatures"]

MODULES: Final = (context, places, recording, sampling, weights)
"""Their tests are registered when they are imported."""


def signatures(disagreement: Disagreement) -> list[Cause]:
    """The foremost cause that this pair's data shows, or none."""
    for test in SIGNATURES:
        with note_in_error(f"the rule {test.__name__}"):
            cause = test(disagreement)
        if cause is not None:
            return [cause]
    return []
