"""Clean and precision: what the numbers say when no bug is seen, and which known differences they do not show."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.notation import write_estimate, write_number, write_percent, write_token_count, write_tokens
from mismatch_probe.records.summary import SettingFinding, Verdict
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.departures import FP32_AGREES_NATS, SPIKE_NATS
from mismatch_probe.verdict.preflight.sampling import PROMPT_START
from mismatch_probe.verdict.preflight.weights import TEXT
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.weights import routing
from mismatch_probe.verdict.size import beside_usual

DOMINANT_SIDE_SHARE = 0.8


def clean(case: Case) -> Verdict | None:
    """The verdict where the pair itself agrees as FP32 does; None elsewhere."""
    mean, largest = case.metrics["abs_logprob_diff"], case.metrics["abs_logprob_diff_max"]
    is_exact = case.exact is case.disagreement
    if not is_exact and (mean.value > FP32_AGREES_NATS or largest.value > SPIKE_NATS):
        return None
    cause = Code.CLEAN.cause([f"largest abs(d) {write_number(largest.value)} nats"], size=write_estimate(mean).value)
    return Verdict(kind="clean", **cause.model_dump())


def precision(case: Case, disagreement: Disagreement) -> Verdict:
    """Precision where FP32 agrees; undecided where there is no FP32 pair. Flips of expert routing are named in both."""
    kl = case.metrics["kl_k3"]
    shown = [
        f"token KL (k3) {write_estimate(kl)}",
        *_length_evidence(case),
        *_side_evidence(case),
        *(finding.what for finding in case.preflight if finding.code == Code.ONE_SIDED_DTYPE),
    ]
    size = write_estimate(kl).value
    flips = routing(disagreement)
    if case.exact is None:
        undecided = Code.UNEXPLAINED.cause(
            [beside_usual(case, disagreement), *shown],
            _length_advice(case),
            what=f"The sides differ by KL {write_estimate(kl).value} a token; {_what_is_open(case)}.",
        )
        return Verdict(kind="undecided", also=[] if flips is None else [flips], **undecided.model_dump())
    shown.append(f"FP32 against FP32: mean abs(d) {write_number(float(case.exact.pair.abs_diff.mean()))} nats")
    rounding = Code.PRECISION.cause(shown, _length_advice(case), kl=size, proof=", and agree in FP32")
    if flips is None:
        return Verdict(kind="precision", **rounding.model_dump())
    return Verdict(kind="precision", also=[rounding], **flips.model_dump())


def _what_is_open(case: Case) -> str:
    if not case.has_run:
        return "log-probs of these formats alone do not tell rounding from a bug"
    if case.is_logged:
        return "a log alone does not tell rounding from a bug"
    return "without an FP32 pair it may be a bug"


def _length_evidence(case: Case) -> list[str]:
    if case.length is None or case.length.budget_tokens is None:
        return []
    budget = case.length.budget_tokens
    at_most = "at most " if case.length.budget_tail_is_open else ""
    beyond = "extrapolated beyond" if case.length.longest_budget_is_extrapolated else "inside"
    median = write_token_count(case.length.median_response)
    return [
        f"length budget at ESS {case.length.budget_ess:g}: {at_most}{write_tokens(budget)} tokens, {beyond} the "
        f"{write_token_count(case.length.measured_up_to)} measured; median response {median}"
    ]


def _length_advice(case: Case) -> list[str]:
    if case.length is None or case.length.budget_tokens is None:
        return []
    if case.length.budget_tokens.value >= case.length.measured_up_to:
        return []
    return [
        "Responses are longer than the length budget: sequence-level importance weights lose more than half of their "
        "effective sample; use a closer dtype or token-level corrections."
    ]


def _side_evidence(case: Case) -> list[str]:
    if case.blame is None or case.blame.share_pi is None:
        return []
    return [f"the error against the reference is {where_the_error_is(case.blame.share_pi)}"]


def where_the_error_is(share: Estimate) -> str:
    """By the training path's share of the squared error: `on both sides: 54 % of its square is the training path's`."""
    if share.value > DOMINANT_SIDE_SHARE:
        where = "mostly on the training side"
    elif share.value < 1 - DOMINANT_SIDE_SHARE:
        where = "mostly on the engine's side"
    else:
        where = "on both sides"
    return f"{where}: {write_percent(share.value)} of its square is the training path's"


NOT_SHOWN: Final = ", which these numbers do not show"


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
            "evidence": [*(f"{finding.what}{NOT_SHOWN}" for finding in known), *verdict.evidence],
            "advice": [*verdict.advice, *(finding.advice for finding in known)],
        }
    )


def known_differences(verdicts: Sequence[Verdict], preflight: Sequence[SettingFinding]) -> list[SettingFinding]:
    """Those that `with_known_differences` put into any of these verdicts."""
    evidence = {line for verdict in verdicts for line in verdict.evidence}
    return [finding for finding in preflight if f"{finding.what}{NOT_SHOWN}" in evidence]
