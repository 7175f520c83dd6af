"""From a case to its verdict: void data, then a bug and its cause, then precision, then clean."""

from mismatch_probe.records.summary import Cause, Kind, Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.data_faults import data_faults
from mismatch_probe.verdict.floors import exact_pair_agrees
from mismatch_probe.verdict.innocent import clean, precision
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.disagreement import Disagreement
from mismatch_probe.verdict.signatures.one_sided_dtype import one_sided_dtype
from mismatch_probe.verdict.wording import scientific

BY_ELIMINATION = (Code.STALE_WEIGHTS,)
"""Causes that hold only while nothing else is known to differ."""


def judge(case: Case) -> Verdict:
    """The verdict on one pair. The foremost cause is named; others that hold are listed beside it."""
    void = list(data_faults(case))
    if case.found is None:
        return _verdict("broken", void)
    has_bug = case.exact is not None and not exact_pair_agrees(case.exact)
    causes = _bugs(case, case.found, has_bug=has_bug)
    if void:
        return _verdict("broken", [*void, *causes])
    if causes:
        return _verdict("bug", causes)
    return clean(case) or precision(case, case.found)


def _verdict(kind: Kind, causes: list[Cause]) -> Verdict:
    first, *others = causes
    return Verdict(kind=kind, also=others, **first.model_dump())


def _bugs(case: Case, found: Disagreement, *, has_bug: bool) -> list[Cause]:
    """Causes of a bug, foremost first. The FP32 pair shows them best; what only this pair has is looked for in it."""
    causes: list[Cause] = []
    if has_bug and case.exact is not None:
        causes = _with_settings(case, signatures(case.exact)) or [_nameless(case.exact)]
    elif not has_bug:
        causes = signatures(found)
    one_sided = None if has_bug else one_sided_dtype(found)
    return causes if one_sided is None else [*causes, one_sided]


def _with_settings(case: Case, causes: list[Cause]) -> list[Cause]:
    """Causes of the data together with those that the settings of both sides make certain to be there."""
    known = {finding.code: finding for finding in case.preflight if finding.level == "error" and finding.code}
    if not known:
        return causes
    named = [cause for cause in causes if cause.code in known or cause.code not in BY_ELIMINATION]
    supported = [
        cause.model_copy(update={"evidence": [*cause.evidence, known[cause.code].what]})
        if cause.code in known
        else cause
        for cause in named
    ]
    seen = {cause.code for cause in named}
    from_settings = [
        Cause(
            code=finding.code,
            sentence=finding.what,
            evidence=[f"effective settings: {finding.setting}"],
            advice=[finding.advice],
        )
        for code, finding in known.items()
        if finding.code and code not in seen
    ]
    return [*supported, *from_settings]


def _nameless(exact: Disagreement) -> Cause:
    return Code.UNEXPLAINED.cause(
        what="This is a bug, not precision: the two implementations disagree in FP32 too, and no known cause fits.",
        evidence=[
            f"FP32 against FP32: mean abs(d) {scientific(float(exact.pair.abs_diff.mean()))} nats, where rounding "
            f"gives about {scientific(exact.floor)}",
            f"largest abs(d) in FP32: {scientific(float(exact.pair.abs_diff.max()))} nats",
        ],
        advice=[
            "Do not change dtypes yet. Look at where along the response and on which tokens the FP32 pair disagrees.",
            "Compare the effective settings of both sides: temperature, top-p, RoPE scaling, sliding window, template.",
        ],
    )
