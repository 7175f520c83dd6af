"""The answer that follows from what is seen of the served tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.audit.judging import (
    AS_DECLARED,
    CHANCE,
    TOLERATED,
    AuditFindings,
    CheckpointView,
    JudgedPrediction,
    alike_words,
    best_law,
    cannot_tell,
    equal_words,
    is_refuted,
    judge_dtype,
    judge_prediction,
    law_fit,
    law_p_value,
    law_words,
    measure_agreement,
    noise_of_change,
    noise_words,
    tokens_needed_for_law,
    tokens_needed_for_noise,
)
from mismatch_probe.audit.scoring import Drawn
from mismatch_probe.config.examinations import AuditSettings
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.notation import join_names, write_many, write_number
from mismatch_probe.records.examinations import Agreement, AuditCandidate, AuditKind, AuditMode, AuditVerdict, LawFit
from mismatch_probe.stats.agreement import Rounding
from mismatch_probe.stats.sequences import Ints


@dataclass(frozen=True)
class AuditAnswer:
    """What the record of an audit holds besides what it is of."""

    mode: AuditMode
    agreement: Agreement | None
    law: LawFit | None
    candidates: list[AuditCandidate]
    cannot_tell: list[str]
    verdict: AuditVerdict


_TELLING_NATS: Final = 0.5
"""Evidence below which a candidate is as likely as the declared setting, to the digits that are written."""
_LEAST_ABOVE_CHANCE: Final = 0.2
"""Of the way from the share of equal tokens of independent draws to 1: below, the noise is not the server's."""
_SHOWN_LAWS: Final[tuple[Callable[[Distribution], Distribution], ...]] = (
    lambda claim: replace(claim, temperature=0.9),
    lambda claim: replace(claim, temperature=1.1),
    lambda claim: replace(claim, top_p=0.99),
    lambda claim: replace(claim, top_p=0.95),
    lambda claim: replace(claim, top_p=0.9),
    lambda claim: replace(claim, top_k=50),
    lambda claim: replace(claim, top_k=20),
    lambda claim: replace(claim, min_p=0.05),
)
"""Departures that a record always has, with the tokens that they take."""


def judge(findings: AuditFindings) -> AuditAnswer:
    """The answer; errors a sound server may be called another with are at most CHANCE for each thing that is tested."""
    sample, look = findings.sample, findings.look
    rounding = claim = None
    if look.claim is not None and findings.differences is not None and not _is_unrelated(look):
        rounding = Rounding.of(look.claim.margins, findings.differences - look.claim.differences)
        claim = judge_prediction("as declared", AS_DECLARED, look.claim, rounding, sample.clusters)
    if not _are_seeds_of_another_temperature(look, claim, rounding, sample.clusters):
        look = replace(look, by_seeds=None)
        findings = replace(findings, look=look)
    mode: AuditMode = "greedy" if sample.law is None else "sampled" if claim is None else "predicted"
    agreement = None
    if claim is not None and rounding is not None and findings.in_dtype is not None:
        agreement = measure_agreement(claim, findings.in_dtype, rounding, sample.estimator, sample.clusters)
    fit = None
    if sample.law is not None and look.draws is not None:
        fit = law_fit(look.draws, look.temperature, findings.settings.sampling.seed)
    candidates = [*_declared(claim, look), *_sampling(findings, claim, rounding), *_changed(findings, rounding)]
    num_tokens = len(sample.tokens.rows)
    left_open = cannot_tell(candidates, num_tokens)
    verdict = _verdict(findings, mode, claim, agreement, fit, candidates)
    return AuditAnswer(mode, agreement, fit, candidates, left_open, verdict)


def _are_seeds_of_another_temperature(
    look: CheckpointView, claim: JudgedPrediction | None, rounding: Rounding | None, clusters: Ints
) -> bool:
    """Whether noise that names the tokens at another temperature refutes the declared one."""
    if look.by_seeds is None or claim is None or rounding is None:
        return False
    by = judge_prediction("sampling", "", look.by_seeds.prediction, rounding, clusters)
    return by.fits and is_refuted(by.noise.log_likelihood - claim.noise.log_likelihood, len(look.laws))


def _is_unrelated(look: CheckpointView) -> bool:
    """Whether the tokens agree with those predicted no more than independent draws do: the noise is another."""
    if look.claim is None or look.draws is None or look.fitted is not None or len(look.laws) < 2:
        return False
    by_chance = float(np.exp(look.draws.first).mean())
    equal = float((~look.claim.differs).mean())
    return equal < by_chance + _LEAST_ABOVE_CHANCE * (1 - by_chance)


def _declared(claim: JudgedPrediction | None, look: CheckpointView) -> list[AuditCandidate]:
    evidence = None if look.draws is None or len(look.laws) < 2 else 0.0
    if claim is None:
        return [AuditCandidate(kind="as declared", what=AS_DECLARED, log_evidence=evidence, fits=False)]
    return [_candidate(claim).model_copy(update={"log_evidence": evidence})]


def _candidate(by: JudgedPrediction) -> AuditCandidate:
    return AuditCandidate(
        kind=by.kind,
        what=by.what,
        num_differing=int(by.prediction.differs.sum()),
        noise_times=by.noise.times,
        noise_low=by.noise.low,
        noise_high=by.noise.high,
        fits=by.fits,
    )


def _sampling(
    findings: AuditFindings, named_by: JudgedPrediction | None, rounding: Rounding | None
) -> list[AuditCandidate]:
    """The law that fits best, and the usual departures with the tokens that they take."""
    look, claim = findings.look, findings.sample.law
    if claim is None:
        if look.draws is None:
            return []
        what = f"sampling at temperature {look.temperature.value:.2g}"
        is_drawn = law_p_value(look.draws, findings.settings.sampling.seed) >= CHANCE
        evidence = float(look.draws.first.sum()) - (0.0 if named_by is None else named_by.noise.log_likelihood)
        return [AuditCandidate(kind="sampling", what=what, fits=is_drawn and evidence > 0)]
    assert look.draws is not None
    num_laws = len(look.laws)
    best, _ = best_law(look.laws, look.draws)
    shown_laws = [each(claim) for each in _SHOWN_LAWS]
    numbers = dict.fromkeys(
        [
            *([best] if best else []),
            *([] if look.by_seeds is None else [look.laws.index(look.by_seeds.law)]),
            *(look.laws.index(law) for law in shown_laws if law in look.laws[1:]),
        ]
    )
    candidates = []
    for number in numbers:
        law = look.laws[number]
        log_evidence = float(look.draws.log_probs[number].sum() - look.draws.log_probs[0].sum())
        candidate = AuditCandidate(
            kind="sampling",
            what=law_words(law, claim),
            log_evidence=log_evidence,
            fits=number == best and look.fitted_p_value is not None and look.fitted_p_value >= CHANCE,
            tokens_needed=tokens_needed_for_law(float(look.draws.kl[number]), num_laws),
        )
        prediction = look.fitted if number == best else None
        if look.by_seeds is not None and law == look.by_seeds.law:
            prediction = look.by_seeds.prediction
        if prediction is not None and rounding is not None:
            by = judge_prediction("sampling", candidate.what, prediction, rounding, findings.sample.clusters)
            numbers_of = _candidate(by).model_dump(exclude={"kind", "what", "log_evidence", "tokens_needed"})
            candidate = candidate.model_copy(update=numbers_of)
        candidates.append(candidate)
    return candidates


def _changed(findings: AuditFindings, rounding: Rounding | None) -> list[AuditCandidate]:
    look = findings.look
    candidates = []
    for changed in findings.changed:
        candidate = AuditCandidate(kind=changed.kind, what=changed.what)
        if changed.differences is not None and rounding is not None and look.claim is not None:
            clusters = findings.sample.clusters
            by, own = judge_dtype(changed.what, look.claim, changed.differences, rounding, clusters)
            num_tokens = tokens_needed_for_noise(rounding, look.claim.margins, own)
            candidates.append(_candidate(by).model_copy(update={"moves_times": own, "tokens_needed": num_tokens}))
            continue
        if rounding is not None and changed.prediction is not None and look.claim is not None:
            by = judge_prediction(changed.kind, changed.what, changed.prediction, rounding, findings.sample.clusters)
            own = noise_of_change(rounding, look.claim, changed.prediction)
            candidate = _candidate(by).model_copy(
                update={
                    "moves_times": own,
                    "tokens_needed": tokens_needed_for_noise(rounding, look.claim.margins, own),
                }
            )
        if changed.draws is not None and look.draws is not None:
            num_tried = len(look.laws) + len(findings.changed)
            seed = findings.settings.sampling.seed
            candidate = _with_evidence(candidate, changed.draws, look.draws, num_tried, seed)
        candidates.append(candidate)
    return candidates


def _with_evidence(
    candidate: AuditCandidate, draws: Drawn, as_said: Drawn, num_tried: int, seed: int
) -> AuditCandidate:
    """By the tokens' probabilities; one that is predicted too is judged by its tokens."""
    log_ratios = draws.log_probs[0] - as_said.log_probs[0]
    evidence = float(log_ratios.sum())
    if candidate.num_differing is not None:
        return candidate.model_copy(update={"log_evidence": evidence})
    kl = float((np.expm1(log_ratios) - log_ratios).mean())
    return candidate.model_copy(
        update={
            "log_evidence": evidence,
            "fits": is_refuted(evidence, num_tried) and law_p_value(draws, seed) >= CHANCE,
            "tokens_needed": tokens_needed_for_law(kl, num_tried),
        }
    )


def _verdict(
    findings: AuditFindings,
    mode: AuditMode,
    claim: JudgedPrediction | None,
    agreement: Agreement | None,
    fit: LawFit | None,
    candidates: Sequence[AuditCandidate],
) -> AuditVerdict:
    evidence = _evidence(findings, claim, agreement, fit, candidates)
    cause = _cause_of(findings, claim, candidates)
    if cause is not None:
        what = " or ".join([cause.what, *([] if claim is not None else alike_words(findings.look, cause.what))])
        return AuditVerdict(
            kind="bug",
            cause=what,
            sentence=f"Not as declared: the tokens fit {what}, and not the declared setting.",
            evidence=evidence,
            advice=[_ADVICE[cause.kind]],
        )
    departs = (
        (claim is not None and not claim.fits)
        or (fit is not None and fit.p_value < CHANCE)
        or findings.look.fitted_p_value is not None
    )
    if departs:
        kind: AuditKind = "undecided" if findings.responses.is_text else "bug"
        drawn_otherwise = "" if findings.sample.law is None else "other sampling settings, "
        why = f"{drawn_otherwise}other weights, another prompt, or arithmetic of fewer bits"
        sentence = (
            f"Not as declared, as far as text shows: {why}; or tokenising the text again made other tokens of it."
            if findings.responses.is_text
            else f"Not as declared: {why}; nothing that was tried fits, so that these tokens do not tell which."
        )
        evidence += [*_of_like_size(agreement, candidates), *_as_if_drawn(findings, candidates)]
        return AuditVerdict(kind=kind, cause=None, sentence=sentence, evidence=evidence, advice=[_UNKNOWN])
    others = candidates[1:]
    num_tokens = len(findings.sample.tokens.rows)
    open_ones = [each for each in others if each.tokens_needed is None or each.tokens_needed > num_tokens]
    how = _how(findings.settings, mode)
    if others and len(open_ones) == len(others):
        return AuditVerdict(
            kind="undecided",
            cause=None,
            sentence=f"Nothing departs from {how}, and {write_many(num_tokens, 'token')} are too few to see anything "
            "that was tried.",
            evidence=evidence,
            advice=["Ask for more: --num-prompts, --max-new-tokens, --samples-per-prompt."],
        )
    return AuditVerdict(
        kind="clean", cause=None, sentence=f"As declared: the tokens are those of {how}.", evidence=evidence, advice=[]
    )


def _of_like_size(agreement: Agreement | None, candidates: Sequence[AuditCandidate]) -> list[str]:
    """What the formats that do not fit would do to the scores, to hold the server's noise against."""
    sizes = [
        f"{each.what} {write_number(each.moves_times)} times"
        for each in candidates
        if each.kind == "weights" and each.moves_times is not None
    ]
    if agreement is None or not sizes:
        return []
    return [f"for the size of it: here, rounding moves scores as {join_names(sizes)} the dtype's rounding"]


def _as_if_drawn(findings: AuditFindings, candidates: Sequence[AuditCandidate]) -> list[str]:
    """That greedy tokens look as drawn ones would, which noise explains as well."""
    if findings.sample.law is not None:
        return []
    return [
        f"{each.what} would make tokens like these too; an audit at --temperature 1 tells"
        for each in candidates
        if each.kind == "sampling"
    ]


_ADVICE: Final = {
    "sampling": "Ask who runs the server which sampling settings it applies by itself (the checkpoint's "
    "generation_config.json, a proxy), and give them, or have them removed.",
    "weights": "Ask who runs the server how its weights are quantised.",
    "arithmetic": "Ask who runs the server in which dtype it computes, or give that one as --dtype.",
    "prompt": "Compare the chat template and the system prompt of the server with the checkpoint's.",
}
_UNKNOWN: Final = (
    "Give the same audit another checkpoint that may be served, or have the server say its weights, its dtype and its "
    "prompt template; a server with log-probs is examined better by `mismatch-probe compare --infer NAME:url=...`."
)


def _cause_of(
    findings: AuditFindings, claim: JudgedPrediction | None, candidates: Sequence[AuditCandidate]
) -> AuditCandidate | None:
    """What fits in place of what is declared; of several the likeliest."""
    if findings.responses.other_prompts:
        ours, its = findings.responses.other_prompts[0]
        what = f"prompts of another chat template ({len(its)} tokens where the checkpoint's gives {len(ours)})"
        return AuditCandidate(kind="prompt", what=what)
    fitting = [candidate for candidate in candidates[1:] if candidate.fits]
    by_seeds = findings.look.by_seeds
    if by_seeds is not None and findings.sample.law is not None:
        what = law_words(by_seeds.law, findings.sample.law)
        return next(each for each in fitting if each.kind == "sampling" and each.what == what)
    if findings.sample.law is not None:
        by_evidence = [each for each in fitting if (each.log_evidence or 0.0) > 0]
        if claim is not None:
            by_evidence = [each for each in by_evidence if each.kind == "sampling"]
        if by_evidence:
            return max(by_evidence, key=lambda each: each.log_evidence or 0.0)
    if claim is None or claim.fits:
        return None
    of_predictions = [each for each in fitting if each.num_differing is not None]
    if of_predictions:
        return min(of_predictions, key=lambda each: (each.num_differing or 0, abs(math.log(each.noise_times or 1e-9))))
    return next((each for each in fitting if each.kind == "sampling"), None)


def _evidence(
    findings: AuditFindings,
    claim: JudgedPrediction | None,
    agreement: Agreement | None,
    fit: LawFit | None,
    candidates: Sequence[AuditCandidate],
) -> list[str]:
    lines = []
    dtype = findings.settings.dtype.upper()
    if agreement is not None:
        lines.append(equal_words(agreement))
        verb = "differs" if agreement.num_differing == 1 else "differ"
        noise = noise_words(agreement.noise_times, agreement.noise_low, agreement.noise_high)
        lines.append(
            f"{write_many(agreement.num_differing, 'token')} {verb} where rounding to {dtype} alone makes "
            f"{write_number(agreement.expected_differing)} expected: the scores seem to be moved {noise} as far as "
            f"{dtype} moves them; {write_number(TOLERATED)} times is what other kernels are allowed"
        )
        if claim is not None and claim.is_more_exact:
            lines.append(f"so the server computes more exactly than {dtype} does here, as in FP32")
        if agreement.gaps:
            lines.append(
                f"the largest gap is {write_number(agreement.gaps[0])} nats; {agreement.near_ties} of "
                f"{agreement.num_differing} are near ties (within four times the rounding, "
                f"{write_number(agreement.rounding_nats)} nats)"
            )
    elif findings.sample.seeds is not None:
        lines.append(
            "the seeds' noise is not what --noise says: the tokens agree with those predicted no more often than "
            "independent draws do"
        )
    if fit is not None:
        lines.append(
            f"the tokens are likeliest at temperature {fit.temperature:.3f} [{fit.temperature_low:.3f}, "
            f"{fit.temperature_high:.3f}]; that they were drawn as declared has p = {write_number(fit.p_value)}"
        )
        by_seeds = findings.look.by_seeds
        if by_seeds is not None and agreement is not None:
            num_named = int((~by_seeds.prediction.differs).sum())
            lines.append(
                f"the seeds' noise names most tokens, {write_many(num_named, 'token')}, at temperature "
                f"{by_seeds.fit.value:.3f} [{by_seeds.fit.low:.3f}, {by_seeds.fit.high:.3f}]"
            )
        if fit.num_outside:
            lines.append(
                f"{write_many(fit.num_outside, 'token')} are ones that the declared top-p and top-k do not keep"
            )
    fitting = [each for each in candidates[1:] if each.fits and (each.log_evidence or 0.0) >= _TELLING_NATS]
    best = max(fitting, key=lambda each: each.log_evidence or 0.0, default=None)
    if best is not None:
        lines.append(f"{best.what}: e^{best.log_evidence:.0f} times as likely as the declared setting")
    return lines


def _how(settings: AuditSettings, mode: AuditMode) -> str:
    sampling = settings.sampling
    words = {"greedy": "greedy decoding", "predicted": "its seeds", "sampled": f"temperature {sampling.temperature:g}"}
    return f"{settings.model.path} in {settings.dtype.upper()}, {words[mode]}"
