"""A pair without an FP32 pair of its own, judged by the one that differs from it in named settings alone."""

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import PairSummary, SettingsToldApart, Verdict
from mismatch_probe.verdict.codes import Code


def with_settings(pair: PairSummary, told_apart: SettingsToldApart | None, beside: PairSummary | None) -> PairSummary:
    """The pair with what its settings change; where nothing else is left to explain what it measures, that is its
    verdict.
    """
    if told_apart is None or beside is None:
        return pair
    verdict = pair.verdict
    if verdict.kind == "undecided" and beside.verdict.kind in ("precision", "clean"):
        verdict = _of_settings(told_apart, verdict)
    return pair.model_copy(update={"settings_told_apart": told_apart, "verdict": verdict})


def _of_settings(told_apart: SettingsToldApart, verdict: Verdict) -> Verdict:
    """FP32 agrees for the pair beside this one, so what is added here is the settings' doing."""
    cause = Code.SETTINGS.cause(
        [what_changes(told_apart), *verdict.evidence], what=", ".join(told_apart.settings), beside=_name(told_apart)
    )
    return Verdict(kind="precision", also=verdict.also, **cause.model_dump())


def what_changes(told_apart: SettingsToldApart) -> str:
    """`kl_k3 is 12 [8, 15] times that of bf16/bf16`."""
    if not told_apart.ratios:
        return f"no ratio to {_name(told_apart)} can be had"
    name, ratio = next(iter(told_apart.ratios.items()))
    return f"{name} is {write_estimate(ratio)} times that of {_name(told_apart)}"


def _name(told_apart: SettingsToldApart) -> str:
    return "/".join(told_apart.beside)
