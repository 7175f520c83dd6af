"""From a case to its verdict: void data, then a bug and its cause, then precision, then clean."""

from collections.abc import Iterator

from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import Cause, Kind, SettingFinding, Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.data_faults import copied_leg, data_faults, with_equal_legs
from mismatch_probe.verdict.departures import beyond_format, exact_pair_agrees, other_checkpoint
from mismatch_probe.verdict.headline import with_next_commands
from mismatch_probe.verdict.no_bug import clean, precision, with_known_differences
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.context import CLEAN_FIRST, context_profile
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import one_sided_dtype
from mismatch_probe.verdict.signatures.weights import agree_before, other_experts, with_unshown_repetitions
from mismatch_probe.verdict.size import beyond_rounding, with_few_tokens

BY_ELIMINATION = (Code.STALE_WEIGHTS,)
"""Causes that hold only while nothing else is known to differ."""

BY_PLACE = (Code.POSITIONS, Code.PROMPT_PREFIX)
"""Causes told by where the deviation lies, which a few large ones of another cause can look like."""

OTHER_WEIGHTS = ("adapter", "checkpoint")
"""Settings whose difference explains any shape of the data, so that no shape is told before them."""

COSTS = 1.1
"""Error of the side with the costly setting over the other's, from which the setting is called a cause."""


def judge(case: Case) -> Verdict:
    """The verdict on one pair. The foremost cause is named; others that hold are listed beside it."""
    judged = with_unshown_repetitions(case.disagreement, with_few_tokens(case, _judge(case)))
    return with_next_commands(case, with_known_differences(case, with_equal_legs(case, judged)))


def _judge(case: Case) -> Verdict:
    void = [*data_faults(case), *copied_leg(case)]
    if case.disagreement is None:
        return _verdict("broken", void)
    has_bug = case.exact is not None and not exact_pair_agrees(case.exact)
    causes = _bugs(case, case.disagreement, has_bug=has_bug)
    if void:
        return _verdict("broken", [*void, *causes])
    if causes:
        return _verdict("bug", causes)
    return clean(case) or other_checkpoint(case.departures) or precision(case, case.disagreement)


def _verdict(kind: Kind, causes: list[Cause]) -> Verdict:
    first, *others = causes
    return Verdict(kind=kind, also=others, **first.model_dump())


def _bugs(case: Case, disagreement: Disagreement, *, has_bug: bool) -> list[Cause]:
    """Causes of a bug, foremost first. The FP32 pair shows them best; what only this pair has is looked for in it."""
    if has_bug and case.exact is not None:
        seen_in_fp32 = _with_experts(case.exact, signatures(case.exact))
        causes = _with_roundings(case, case.exact, _with_settings(case, seen_in_fp32))
        return causes or [_nameless(case.exact)]
    causes = signatures(disagreement)
    one_sided = None if causes else one_sided_dtype(disagreement)
    if one_sided is not None:
        causes = [one_sided]
    causes = causes or beyond_format(case.departures)
    if not causes and other_checkpoint(case.departures) is None:
        causes = beyond_rounding(case, disagreement)
    if case.exact is None:
        causes = _with_settings(case, causes)
    seen = {cause.code for cause in causes}
    return causes + [cause for cause in _costs(case, disagreement) if cause.code not in seen]


def _with_settings(case: Case, causes: list[Cause]) -> list[Cause]:
    """Causes that the data shows, supported and completed by settings that are known to differ."""
    differing = [finding for finding in case.preflight if finding.level == "error"]
    if not differing:
        return causes
    shown = [cause for cause in causes if cause.code not in BY_ELIMINATION]
    seen = {cause.code for cause in shown}
    settings = {code: [cause.what for cause in differing if cause.code == code] for code in seen}
    supported = [_named_by(settings[cause.code], cause) for cause in shown]
    weak = [cause for cause in supported if cause.code in BY_PLACE and not settings[cause.code]]
    strong = [cause for cause in supported if cause not in weak]
    told = [finding for finding in differing if finding.code not in seen]
    other_weights = [_of_setting(finding) for finding in told if finding.setting in OTHER_WEIGHTS]
    others = [_of_setting(finding) for finding in told if finding.setting not in OTHER_WEIGHTS]
    return other_weights + strong + others + weak


def _with_experts(exact: Disagreement, causes: list[Cause]) -> list[Cause]:
    """With the experts on which the sides disagree, before causes that hold by elimination; weights that differ
    everywhere are none of these where earlier layers choose alike.
    """
    experts = other_experts(exact)
    if experts is None:
        return causes
    eliminated = [cause for cause in causes if cause.code in BY_ELIMINATION]
    others = [cause for cause in causes if cause.code not in BY_ELIMINATION]
    return [*others, experts, *([] if agree_before(exact) else eliminated)]


def _named_by(settings: list[str], cause: Cause) -> Cause:
    """The cause with the setting that makes it before what the data shows, where one is known to differ."""
    if not settings:
        return cause
    known = settings[0] if "_" in settings[0].split()[0] else f"{settings[0][0].upper()}{settings[0][1:]}"
    return _supported(cause.model_copy(update={"sentence": f"{known}. {cause.sentence}"}), settings)


def _supported(cause: Cause, settings: list[str]) -> Cause:
    return cause.model_copy(update={"evidence": [*cause.evidence, *settings]})


def _of_setting(finding: SettingFinding) -> Cause:
    return Cause(
        code=finding.code or Code.UNEXPLAINED,
        sentence=f"The two sides are set differently: {finding.what}.",
        evidence=[f"effective settings: {finding.setting}"],
        advice=[finding.advice],
    )


def _costs(case: Case, disagreement: Disagreement) -> Iterator[Cause]:
    """Settings known to cost one side precision, where FP32 agrees and that side does err more than the other."""
    if not disagreement.formats_alone or disagreement.errors is None:
        return
    pi, mu = (
        disagreement.errors[0] / disagreement.train_dtype.round_off,
        disagreement.errors[1] / disagreement.infer_dtype.round_off,
    )
    for finding in case.preflight:
        worse, better = (pi, mu) if finding.side == "pi" else (mu, pi)
        if finding.level == "warning" and finding.code and finding.side and worse > COSTS * better:
            compared = (
                f"median error, each side in units of its format: {write_number(pi)} for pi, {write_number(mu)} for mu"
            )
            yield _supported(_of_setting(finding), [compared])


def _with_roundings(case: Case, exact: Disagreement, causes: list[Cause]) -> list[Cause]:
    """With settings that round what FP32 does not, where the side they are on is the one that errs in FP32.

    They come before causes told by where the deviation lies, and in place of those that hold by elimination.
    """
    if exact.errors is None:
        return causes
    pi, mu = exact.errors
    errs_more = {"pi": pi > COSTS * mu, "mu": mu > COSTS * pi}
    compared = f"median error in FP32: {write_number(pi)} nats for pi, {write_number(mu)} for mu"
    roundings = [
        _supported(_of_setting(finding), [*_sizes(exact), compared])
        for finding in case.preflight
        if finding.level == "warning"
        and finding.code == Code.ONE_SIDED_DTYPE
        and finding.side
        and errs_more[finding.side]
    ]
    if not roundings:
        return causes
    shown = [cause for cause in causes if cause.code not in BY_ELIMINATION]
    weak = [cause for cause in shown if cause.code in BY_PLACE]
    return [cause for cause in shown if cause not in weak] + roundings + weak


def _nameless(exact: Disagreement) -> Cause:
    return Code.UNEXPLAINED.cause(
        what="This is a bug, not precision: the two implementations disagree in FP32 too, and no known cause fits.",
        evidence=[
            *_sizes(exact),
            *_where_it_sets_in(exact),
            f"largest abs(d) in FP32: {write_number(float(exact.pair.abs_diff.max()))} nats",
        ],
        advice=[
            "Do not change dtypes yet. Look at where along the response and on which tokens the FP32 pair disagrees.",
            "Compare the effective settings of both sides: temperature, top-p, RoPE scaling, sliding window, template.",
        ],
    )


def _sizes(exact: Disagreement) -> list[str]:
    return [
        f"FP32 against FP32: mean abs(d) {write_number(float(exact.pair.abs_diff.mean()))} nats, where rounding "
        f"gives about {write_number(exact.floor)}"
    ]


def _where_it_sets_in(exact: Disagreement) -> list[str]:
    """What the start of the context rules out, where it was recorded."""
    context = context_profile(exact)
    if context is None:
        return []
    if context.at_first <= CLEAN_FIRST:
        return [
            "the sides agree at the first place of the context, so weights, head and temperature are the same: look at "
            "positions, masks, caches, and a first token that is there twice"
        ]
    return ["the sides disagree at the first place of the context already, so it is not positions alone"]
