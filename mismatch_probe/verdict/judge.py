"""From a case to its verdict: void data, then a bug and its cause, then precision, then clean."""

from collections.abc import Iterator, Sequence
from typing import Final

from mismatch_probe.causes import CauseRank, VerdictKind
from mismatch_probe.causes.comparison import Code
from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.summary import Cause, SettingFinding, Verdict
from mismatch_probe.stats.results import Conditioning
from mismatch_probe.verdict.case import Case, copied_leg, data_faults, with_equal_legs
from mismatch_probe.verdict.departures import (
    ExactOutcome,
    beyond_format,
    conditioning_words,
    exact_outcome,
    level_change_of,
    other_checkpoint,
)
from mismatch_probe.verdict.growth import with_growth
from mismatch_probe.verdict.headline import OTHER_WEIGHTS, update_words, with_next_commands
from mismatch_probe.verdict.preflight.facts import AGREEMENT
from mismatch_probe.verdict.rounding import (
    beyond_rounding,
    clean,
    precision,
    undecided_by_rounding,
    with_few_tokens,
    with_known_differences,
    with_noise,
)
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.context import CLEAN_FIRST, context_profile
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import one_sided_dtype
from mismatch_probe.verdict.signatures.weights import agree_before, other_experts, with_unshown_repetitions

WEIGHTS_SETTINGS: Final = ("adapter", "checkpoint")
"""Settings whose difference is one of weights."""

COSTS: Final = 1.1
"""Error of the side with the costly setting over the other's, from which the setting is called a cause."""


def judge(case: Case) -> Verdict:
    """The verdict on one pair. The foremost cause is named; others that hold are listed after it."""
    verdict = with_unshown_repetitions(case.disagreement, with_noise(case, with_few_tokens(case, _judge(case))))
    full = with_known_differences(case, with_equal_legs(case, verdict))
    complete = _with_conditioning(case, _with_levels(case, _with_contradiction(case, full)))
    return with_next_commands(case, with_growth(case.growth, complete))


def _with_conditioning(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what rounding in FP32 was measured to do to the checkpoint in its evidence."""
    exact = case.exact or case.disagreement
    if exact is None or exact.conditioning is None or verdict.kind == "broken":
        return verdict
    if isinstance(exact.conditioning, Conditioning):
        what = conditioning_words(exact.conditioning)
    else:
        what = f"what rounding in FP32 does to this checkpoint could not be measured in FP64: {exact.conditioning}"
    return verdict.model_copy(update={"evidence": [*verdict.evidence, what]})


def _with_levels(case: Case, verdict: Verdict) -> Verdict:
    """The verdict on a log, with changes of level inside its responses: they name no weights.

    Changes that the log records are evidence on any sound log that is not clean, and the command that is advised takes
    both weights. Those that it does not record are looked for where the cause is unknown.
    """
    evidence, advice = list(verdict.evidence), list(verdict.advice)
    if case.update_ratio is not None and verdict.kind not in ("broken", "clean"):
        evidence.append(update_words(case.update_ratio))
    is_named = verdict.kind not in ("undecided", "precision", "clean") and verdict.code != Code.BEYOND_FORMAT
    if not case.is_logged or case.disagreement is None or is_named:
        return verdict.model_copy(update={"evidence": evidence})
    change = level_change_of(case.disagreement)
    if change is not None:
        evidence.append(change.words)
        if case.update_ratio is None:
            sentence = f"{change.words[0].upper()}{change.words[1:]}"
            advice.append(f"{sentence}. `explain` with both checkpoints tells which (`{OTHER_WEIGHTS}`).")
    return verdict.model_copy(update={"evidence": evidence, "advice": advice})


def _with_contradiction(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with why the reference is left out where it does not agree with itself, before all evidence."""
    findings = [finding for finding in case.preflight if finding.setting == AGREEMENT]
    evidence = [*(finding.what for finding in findings), *verdict.evidence]
    advice = [*verdict.advice, *(finding.advice for finding in findings)]
    return verdict.model_copy(update={"evidence": evidence, "advice": advice}) if findings else verdict


def _judge(case: Case) -> Verdict:
    void = [*data_faults(case), *copied_leg(case)]
    if case.disagreement is None:
        return _verdict_of_causes("broken", void)
    outcome = None if case.exact is None else exact_outcome(case.exact)
    causes = _bugs(case, case.disagreement, outcome)
    if void:
        return _verdict_of_causes("broken", [*void, *causes])
    if causes:
        return _verdict_of_causes("bug", causes)
    if case.exact is not None and outcome == "open":
        return undecided_by_rounding(case.exact)
    return clean(case) or other_checkpoint(case.departures) or precision(case, case.disagreement)


def _verdict_of_causes(kind: VerdictKind, causes: list[Cause]) -> Verdict:
    first, *others = causes
    return Verdict(kind=kind, also=others, **first.model_dump())


def _bugs(case: Case, disagreement: Disagreement, outcome: ExactOutcome | None) -> list[Cause]:
    """Causes of a bug, foremost first. The FP32 pair shows them best; what only this pair has is looked for in it.

    Where it is open whether that pair differs by more than rounding, a cause must have a shape of its own.
    """
    if outcome in ("differs", "open") and case.exact is not None:
        causes = _by_rank(case, _in_fp32(case.exact), _causes_that_round(case, case.exact))
        if outcome == "open":
            return [cause for cause in causes if _rank_of(cause.code) is not CauseRank.ELIMINATION]
        return causes or [_nameless(case.exact)]
    causes = signatures(disagreement)
    one_sided = None if causes else one_sided_dtype(disagreement)
    if one_sided is not None:
        causes = [one_sided]
    causes = causes or beyond_format(case.departures)
    if not causes and other_checkpoint(case.departures) is None:
        causes = beyond_rounding(case, disagreement)
    if case.exact is None:
        causes = _by_rank(case, causes)
    codes = {cause.code for cause in causes}
    return causes + [cause for cause in _costs(case, disagreement) if cause.code not in codes]


def _in_fp32(exact: Disagreement) -> list[Cause]:
    """What the FP32 pair shows; weights that differ everywhere are not the cause where earlier layers choose alike."""
    causes, experts = signatures(exact), other_experts(exact)
    if experts is None:
        return causes
    if agree_before(exact):
        causes = [cause for cause in causes if _rank_of(cause.code) is not CauseRank.ELIMINATION]
    return [*causes, experts]


def _by_rank(case: Case, causes: list[Cause], roundings: Sequence[Cause] = ()) -> list[Cause]:
    """Causes that the data shows, with settings known to differ or to round one side, by the rank of their evidence.

    A setting that makes a cause which the data shows supports it, and is no cause of its own.
    """
    differing = [finding for finding in case.preflight if finding.level == "error"]
    knows_a_setting = bool(differing or roundings)
    visible = [cause for cause in causes if not (knows_a_setting and _rank_of(cause.code) is CauseRank.ELIMINATION)]
    settings = {cause.code: [finding.what for finding in differing if finding.code == cause.code] for cause in visible}
    candidates: list[tuple[Cause, CauseRank]] = []
    for cause in visible:
        rank = _rank_of(cause.code)
        if rank is CauseRank.PLACE and (settings[cause.code] or not knows_a_setting):
            rank = CauseRank.SHAPE
        candidates.append((_named_by(settings[cause.code], cause), rank))
    candidates += [
        (_of_setting(finding), CauseRank.OTHER_WEIGHTS if finding.setting in WEIGHTS_SETTINGS else CauseRank.SETTING)
        for finding in differing
        if finding.code not in settings
    ]
    candidates += [(rounding, CauseRank.ROUNDING) for rounding in roundings]

    def order(candidate: tuple[Cause, CauseRank]) -> tuple[bool, CauseRank]:
        cause, rank = candidate
        return bool(roundings) and _rank_of(cause.code) is CauseRank.PLACE, rank

    return [cause for cause, _ in sorted(candidates, key=order)]


def _rank_of(code: str) -> CauseRank:
    return Code.by_name(code).entry.rank


def _named_by(settings: list[str], cause: Cause) -> Cause:
    """The cause with the setting that makes it before what the data shows, where one is known to differ."""
    if not settings:
        return cause
    opening = settings[0] if "_" in settings[0].split()[0] else f"{settings[0][0].upper()}{settings[0][1:]}"
    return _with_evidence(cause.model_copy(update={"sentence": f"{opening}. {cause.sentence}"}), settings)


def _with_evidence(cause: Cause, settings: list[str]) -> Cause:
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
            medians = (
                f"median error, each side in units of its format: {write_number(pi)} for pi, {write_number(mu)} for mu"
            )
            yield _with_evidence(_of_setting(finding), [medians])


def _causes_that_round(case: Case, exact: Disagreement) -> list[Cause]:
    """Settings that round what FP32 does not, where the side they are on is the one that errs in FP32."""
    if exact.errors is None:
        return []
    pi, mu = exact.errors
    errs_more = {"pi": pi > COSTS * mu, "mu": mu > COSTS * pi}
    medians = f"median error in FP32: {write_number(pi)} nats for pi, {write_number(mu)} for mu"
    return [
        _with_evidence(_of_setting(finding), [*_sizes(exact), medians])
        for finding in case.preflight
        if finding.level == "warning"
        and finding.code == Code.ONE_SIDED_DTYPE
        and finding.side
        and errs_more[finding.side]
    ]


def _nameless(exact: Disagreement) -> Cause:
    return Cause.of(
        Code.UNEXPLAINED,
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
    where = ["the sides disagree at the first place of the context already, so it is not positions alone"]
    if context.num_agreeing:
        where.append(
            f"{write_count(context.num_agreeing)} of {write_many(exact.pair.sequences.num_clusters, 'prompt')} agree "
            "to rounding: look at what only some rows of a batch have, as padding that is attended to, and other "
            "sequences of a packed row"
        )
    return where
