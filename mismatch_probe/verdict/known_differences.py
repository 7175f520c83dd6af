"""What is known to differ between the sides, of which the numbers of a sound pair show nothing."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.records.summary import SettingFinding, Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.preflight.checkpoints import TEXT

_NOT_SHOWN: Final = ", which these numbers do not show"


def with_known_differences(case: Case, verdict: Verdict) -> Verdict:
    """A verdict that names no bug, with other weights, settings and templates as evidence: they are facts all the same.

    They come before what the numbers show, with what would make the sides alike as advice.
    """
    if verdict.kind in ("bug", "broken"):
        return verdict
    known = [finding for finding in case.preflight if finding.level == "error" or finding.setting in TEXT]
    return verdict.model_copy(
        update={
            "evidence": [*(f"{finding.what}{_NOT_SHOWN}" for finding in known), *verdict.evidence],
            "advice": [*verdict.advice, *(finding.advice for finding in known)],
        }
    )


def known_differences(verdicts: Sequence[Verdict], preflight: Sequence[SettingFinding]) -> list[SettingFinding]:
    """Those that `with_known_differences` put into any of these verdicts."""
    evidence = {line for verdict in verdicts for line in verdict.evidence}
    return [finding for finding in preflight if f"{finding.what}{_NOT_SHOWN}" in evidence]
