"""A pair without an FP32 pair of its own, judged by the one that differs from it in named settings alone."""

from typing import Final

from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import Kind, PairSummary, SettingsToldApart, Verdict
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.metric_words import metric_words

MODEST: Final = 3.0
"""Times that settings may make the KL as large before it is asked whether they do no more than round."""

SPIKE: Final = 10.0
"""Times that the largest abs(d) may be before it is."""


def with_settings_told_apart(
    pair: PairSummary, told_apart: SettingsToldApart | None, beside: PairSummary | None
) -> PairSummary:
    """The pair with what its settings change; where it was undecided and FP32 agrees for the other, they are named.

    FP32 was not run with these settings, so a bug of theirs cannot be ruled out: only what they hardly change is taken
    for precision.
    """
    if told_apart is None or beside is None:
        return pair
    verdict = pair.verdict
    if verdict.kind == "undecided" and beside.verdict.kind in ("precision", "clean"):
        cause = Code.SETTINGS.cause(
            [what_changes(told_apart), *verdict.evidence], what=", ".join(told_apart.settings), beside=_name(told_apart)
        )
        kind: Kind = "precision" if _is_modest(pair, told_apart, beside) else "undecided"
        advice = [] if kind == "precision" else verdict.advice
        verdict = Verdict(kind=kind, also=verdict.also, **cause.model_copy(update={"advice": advice}).model_dump())
    return pair.model_copy(update={"settings_told_apart": told_apart, "verdict": verdict})


def _is_modest(pair: PairSummary, told_apart: SettingsToldApart, beside: PairSummary) -> bool:
    """Whether the settings make the KL hardly larger, or not so that it can be told, and no token far off."""
    ratio = told_apart.ratios.get("kl_k3")
    largest = [deviation.metrics.get("abs_logprob_diff_max") for deviation in (pair, beside)]
    if ratio is None or largest[0] is None or largest[1] is None:
        return False
    more = ratio.value > MODEST and (ratio.low is None or ratio.low > 1)
    return not more and largest[0].value <= SPIKE * largest[1].value


def what_changes(told_apart: SettingsToldApart) -> str:
    """`KL (k3) is 12 [8, 15] times that of BF16`."""
    if not told_apart.ratios:
        return f"no ratio to {_name(told_apart)} can be had"
    name, ratio = next(iter(told_apart.ratios.items()))
    return f"{metric_words(name)} is {write_estimate(ratio)} times that of {_name(told_apart)}"


def _name(told_apart: SettingsToldApart) -> str:
    return sides_label(*told_apart.beside)
