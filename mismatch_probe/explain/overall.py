"""The verdict on a log from those on its sides: the graver one, unless both sides depart alike."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from mismatch_probe.explain.sentences import GRAVEST_FIRST
from mismatch_probe.explain.tokens import LoggedTokens
from mismatch_probe.notation import write_number
from mismatch_probe.records.explanation import SideExplanation
from mismatch_probe.records.summary import Verdict
from mismatch_probe.verdict.codes import Code

_AGREE_FLOORS: Final = 3.0
"""Of one side's rounding: two sides that round alone lie 1.4 apart."""


def overall(sides: Sequence[SideExplanation], tokens: LoggedTokens) -> Verdict:
    """On the log."""
    gravest = min((side.verdict for side in sides), key=lambda verdict: GRAVEST_FIRST.index(verdict.kind))
    if len(sides) < 2 or gravest.kind == "broken":
        return gravest
    apart = tokens.columns["mu"] - tokens.columns["pi"]
    apart_nats = float(np.sqrt(np.nanmean(apart[tokens.sampled] ** 2)))
    alike = f"the two sides lie {write_number(apart_nats)} nats rms apart, so they agree with each other"
    codes = {side.verdict.code for side in sides}
    if apart_nats > _AGREE_FLOORS * max(side.floor_nats for side in sides) or len(codes) > 1:
        return gravest
    if codes == {str(Code.UNEXPLAINED)}:
        return Verdict(
            kind="undecided",
            code=Code.OTHER_CHECKPOINT,
            sentence="Both sides depart alike from the checkpoint: it is not the one that made this log.",
            evidence=[*gravest.evidence, alike],
            advice=["Give the checkpoint, and the adapter, that the log's step was sampled and trained with."],
        )
    if gravest.kind == "bug":
        return gravest.model_copy(
            update={
                "sentence": f"Both sides depart alike, so it is no mismatch between them. {gravest.sentence}",
                "evidence": [*gravest.evidence, alike],
            }
        )
    return gravest
