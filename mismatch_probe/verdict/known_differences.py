"""What is known of the sides and of their prompts, and of which the numbers of a sound pair show nothing."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.records.summary import SettingFinding, Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.preflight.checkpoints import TEXT
from mismatch_probe.verdict.preflight.sampling import PROMPT_START

_NOT_SHOWN: Final = ", which these numbers do not show"


def with_known_differences(case: Case, verdict: Verdict) -> Verdict:
    """A verdict that names no bug, with known differences and a start that prompts lack as evidence: they are facts.

    They come before what the numbers show, with what would mend them as advice.
    """
    if verdict.kind in ("bug", "broken"):
        return verdict
    facts = (*TEXT, PROMPT_START)
    known = [finding for finding in case.preflight if finding.level == "error" or finding.setting in facts]
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
