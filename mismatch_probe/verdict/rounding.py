"""What rounding explains: how large a deviation it can make, and what the numbers say where no bug is seen.

Measured mean abs(d) in nats a token, of two right sides: BF16 0.002 to 0.035 on dense models, up to 0.064 on mixtures
of experts and on a model cut to four layers; 0.18 rms with a KV cache in FP8; FP16 an eighth of BF16 (published figures
of seven systems, and tiny random models). The bounds leave a wide margin: what is beyond them is no rounding.
"""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import COARSEST_FIRST, Dtype
from mismatch_probe.notation import (
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_percent,
    write_token_count,
    write_tokens,
)
from mismatch_probe.records.summary import Cause, SettingFinding, Verdict
from mismatch_probe.stats.results import Blame, Conditioning, Estimate, FewTokens, StepGrowth
from mismatch_probe.stats.sequences import Reals
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.departures import (
    FP32_AGREES_NATS,
    SPIKE_NATS,
    exact_outcome,
    rounds_by_more,
    sides_by_rounding,
)
from mismatch_probe.verdict.growth import last_steps
from mismatch_probe.verdict.preflight.rules import PROMPT_START
from mismatch_probe.verdict.preflight.weights import TEXT
from mismatch_probe.verdict.signatures.profile import Disagreement, lower_bound, usual_nats
from mismatch_probe.verdict.signatures.recording import is_on_grid
from mismatch_probe.verdict.signatures.weights import routing

MOST_NATS: Final = 0.5
"""Mean abs(d) that BF16 can make at most: eight times the largest measured."""

MOST_COMPRESSED_NATS: Final = 0.25
"""That which a KV cache or weights in 8 bit can make under any arithmetic, and which no log declares."""


MOST_NATS_OF_A_TOKEN: Final = 20.0
"""abs(d) of a single token, eighty times the last digit that a logit of 64 has in BF16."""


def most_by_rounding(dtypes: tuple[Dtype, Dtype], measured: Conditioning | str | None = None) -> float:
    """The largest mean abs(d) (nats) that rounding in these formats of pi and mu can make.

    Of a checkpoint on which FP32 was measured to err by more than on a well-conditioned one, a coarser format errs by
    as many times more as it is coarser.
    """
    coarsest = max(dtype.round_off for dtype in dtypes)
    most = max(MOST_NATS * coarsest / Dtype.BF16.round_off, MOST_COMPRESSED_NATS)
    if not rounds_by_more(measured):
        return most
    return max(most, measured.error_fp32.value * coarsest / Dtype.FP32.round_off)


def beyond_rounding(case: Case, disagreement: Disagreement) -> list[Cause]:
    """The bug of sides that differ by more than any rounding in their formats; none where FP32 or a known setting says
    what the deviation is, or where it can be rounding.
    """
    mean = case.metrics.get("abs_logprob_diff")
    if mean is None or case.exact is not None or _settings_that_round(case):
        return []
    at_last = None if case.growth is None else case.growth.last_abs_diff
    most = most_by_rounding(_formats(case, disagreement), disagreement.conditioning)
    formats = _names_of_formats(_formats(case, disagreement))
    abs_diff = disagreement.pair.abs_diff
    num_far = int((abs_diff > max(MOST_NATS_OF_A_TOKEN, most)).sum())
    if lower_bound(mean) > most:
        what = _size_and_bound(mean, most, formats)
        look_for = (
            "scores of other tokens, rows of another response, another prompt before the response, and other weights"
        )
    elif num_far:
        what = (
            f"{write_many(num_far, 'token')} of {write_count(abs_diff.size)} differ by more than "
            f"{write_number(MOST_NATS_OF_A_TOKEN)} nats, up to {write_number(float(abs_diff.max()))}, which no "
            "format rounds to; the report lists the worst"
        )
        look_for = "a number that stands for a missing log-prob, and for scores of other tokens at these places"
    elif case.growth is not None and at_last is not None and lower_bound(at_last) > most:
        steps = last_steps(case.growth)
        what = f"at {steps} {_size_and_bound(at_last, most, formats)}"
        return [Cause.of(Code.BEYOND_FORMAT, [what], variant="steps", steps=steps, formats=formats)]
    else:
        return []
    figures = {"sides": "the two sides differ", "formats": formats, "look_for": look_for}
    return [Cause.of(Code.BEYOND_FORMAT, [what], variant="rounding", **figures)]


def _size_and_bound(mean: Estimate, most: float, formats: str) -> str:
    return (
        f"mean abs(d) is {write_estimate(mean)} nats a token; rounding in {formats} explains at most "
        f"{write_number(most)} of it, {write_percent(most / mean.value)}"
    )


def usual_size_sentence(case: Case, disagreement: Disagreement) -> str:
    """The deviation, and what rounding in the pair's formats was measured to make."""
    mean, dtypes, where = case.metrics["abs_logprob_diff"], _formats(case, disagreement), ""
    if case.growth is not None and case.growth.last_abs_diff is not None:
        mean, where = case.growth.last_abs_diff, f"at {last_steps(case.growth)} "
    usual = usual_nats(*dtypes)
    alone = "" if mean.value > usual else ", so that its size alone shows no bug"
    return (
        f"{where}mean abs(d) is {write_estimate(mean)} nats a token; rounding in "
        f"{_names_of_formats(dtypes)} made {write_number(usual)} at most where it was measured, and cannot make more "
        f"than {write_number(most_by_rounding(dtypes, disagreement.conditioning))}{alone}"
    )


NOISE: Final = {"mu_siblings": "the engine", "pi_siblings": "the training path"}
"""Floors that responses to one prompt give of a side, which need no checkpoint and no second request."""


_MORE_THAN_D: Final = 9.0
"""Mean square of noise over that of d with which d cannot be made of it: independent noise is part of d."""


def noise_sentences(blame: Blame | None) -> list[str]:
    """How far each side is from itself on the tokens that responses to one prompt share, and what that makes of d."""
    if blame is None:
        return []
    floors = {name: blame.floors[name] for name in NOISE if name in blame.floors}
    sentences = [noise_sentence(NOISE[name], floor) for name, floor in floors.items()]
    of_noise, of_d = sum(floor.value**2 for floor in floors.values()) / 2, blame.rms_difference.value**2
    if of_noise > _MORE_THAN_D * of_d > 0:
        sentences.append(
            "that is more than the sides differ by: both move alike, as where the contexts of these responses differ "
            "in what the log does not hold"
        )
    elif of_noise and of_d:
        share = "all" if of_noise >= of_d else write_percent(of_noise / of_d)
        sentences.append(f"noise of that size makes up {share} of d (share of the mean square)")
    return sentences


def noise_sentence(who: str, floor: Estimate) -> str:
    """One side's noise in words; `floor` is the rms difference of two log-probs of one token."""
    tokens = write_many(floor.num_tokens, "token")
    if floor.value == 0:
        return f"{who} repeats itself bit for bit on {tokens} that responses to one prompt share"
    return (
        f"{who}'s own noise is rms {write_estimate(floor)} nats: the log-probs of one token differ by that much "
        f"between responses that are equal up to it ({tokens})"
    )


def with_noise(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with the sides' own noise in its evidence where responses share tokens."""
    sentences = noise_sentences(case.blame)
    return verdict.model_copy(update={"evidence": [*verdict.evidence, *sentences]}) if sentences else verdict


def with_few_tokens(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what few tokens do to its numbers in its evidence; one of clean data needs none."""
    if case.few_tokens is None or verdict.kind == "clean":
        return verdict
    return verdict.model_copy(update={"evidence": [*verdict.evidence, few_tokens_words(case.few_tokens)]})


def few_tokens_words(few: FewTokens) -> str:
    """How many such tokens there are, their share, the place of the largest, and which are exact zeros."""
    many = few.num_tokens > 1
    which = "the largest" if many else "it"
    sentence = (
        f"{write_many(few.num_tokens, 'token')} of {write_count(few.of_tokens)} {'hold' if many else 'holds'} "
        f"{write_percent(few.share_of_kl)} of the KL (k3): {which} stands at index {few.position} (token "
        f"{few.position + 1}) of {few.response}, with log pi {write_number(few.log_pi)} and log mu "
        f"{write_number(few.log_mu)}"
    )
    sides = ((few.zeros_mu, "the engine's side"), (few.zeros_pi, "the training path's side"))
    subjects = [
        (f"{count} of them" if many else "it", "are" if count > 1 else "is", side) for count, side in sides if count
    ]
    zeros = [f"{subject} {verb} exactly 0 on {side}" for subject, verb, side in subjects]
    return "; ".join([sentence, *zeros])


def of_few_tokens(few: FewTokens | None) -> str:
    """`, 94 % of it from 1 token of 3,072`, behind a KL."""
    if few is None:
        return ""
    tokens = f"{write_many(few.num_tokens, 'token')} of {write_count(few.of_tokens)}"
    return f", {write_percent(few.share_of_kl)} of it from {tokens}"


def _settings_that_round(case: Case) -> list[SettingFinding]:
    """Settings known to round one side."""
    return [
        finding for finding in case.preflight if finding.level == "warning" and finding.code == Code.ONE_SIDED_DTYPE
    ]


def _formats(case: Case, disagreement: Disagreement) -> tuple[Dtype, Dtype]:
    """Of pi and mu: as declared, or as the grid shows on which all of a side's log-probs lie, where that is coarser."""
    dtypes = (case.train_dtype, case.infer_dtype)
    legs = (disagreement.pair.log_pi, disagreement.pair.log_mu)
    pi, mu = (_coarser(dtype, leg) for dtype, leg in zip(dtypes, legs, strict=True))
    return pi, mu


def _coarser(dtype: Dtype, leg: Reals) -> Dtype:
    dtype_of_grid = next((dtype for dtype in COARSEST_FIRST if is_on_grid(leg, dtype)), dtype)
    return max(dtype, dtype_of_grid, key=lambda dtype: dtype.round_off)


def _names_of_formats(dtypes: tuple[Dtype, Dtype]) -> str:
    return " and ".join(dict.fromkeys(dtype.upper() for dtype in dtypes))


DOMINANT_SIDE_SHARE = 0.8


def clean(case: Case) -> Verdict | None:
    """The verdict where the pair itself agrees as FP32 does; None elsewhere."""
    mean, largest = case.metrics["abs_logprob_diff"], case.metrics["abs_logprob_diff_max"]
    is_exact = case.exact is not None and case.exact is case.disagreement and exact_outcome(case.exact) == "agrees"
    if not is_exact and (mean.value > FP32_AGREES_NATS or largest.value > SPIKE_NATS):
        return None
    cause = Cause.of(
        Code.CLEAN, [f"largest abs(d) {write_number(largest.value)} nats"], size=write_estimate(mean).value
    )
    return Verdict(kind="clean", **cause.model_dump())


def precision(case: Case, disagreement: Disagreement) -> Verdict:
    """Precision where FP32 agrees; undecided where there is no FP32 pair. Flips of expert routing are named in both."""
    kl = case.metrics["kl_k3"]
    evidence = [
        f"token KL (k3) {write_estimate(kl)}",
        *_length_evidence(case),
        *_side_evidence(case),
        *(finding.what for finding in case.preflight if finding.code == Code.ONE_SIDED_DTYPE),
    ]
    size = write_estimate(kl).value
    flips = routing(disagreement)
    if case.exact is None:
        cause = Cause.of(
            Code.UNEXPLAINED,
            [usual_size_sentence(case, disagreement), *evidence],
            _length_advice(case, "token-level corrections bound that until the cause is known"),
            what=_what_is_open(case, disagreement),
        )
        return Verdict(kind="undecided", also=[] if flips is None else [flips], **cause.model_dump())
    evidence.append(f"FP32 against FP32: mean abs(d) {write_number(float(case.exact.pair.abs_diff.mean()))} nats")
    if isinstance(case.exact.conditioning, Conditioning) and exact_outcome(case.exact) == "rounding":
        ill = Cause.of(
            Code.ILL_CONDITIONED,
            evidence,
            fp32=write_estimate(case.exact.conditioning.error_fp32).value,
            sides=sides_by_rounding(case.exact.conditioning),
        )
        return Verdict(kind="precision", also=[] if flips is None else [flips], **ill.model_dump())
    advice = _length_advice(case, "use a closer dtype or token-level corrections")
    rounding = Cause.of(Code.PRECISION, evidence, advice, kl=size, proof=", and agree in FP32")
    if flips is None:
        return Verdict(kind="precision", **rounding.model_dump())
    return Verdict(kind="precision", also=[rounding], **flips.model_dump())


def undecided_by_rounding(exact: Disagreement) -> Verdict:
    """The verdict where an FP32 pair differs and rounding in FP32 may or may not be why."""
    measured = exact.conditioning
    if isinstance(measured, Conditioning):
        fp32, sides = write_estimate(measured.error_fp32).value, sides_by_rounding(measured, is_open=True)
        cause = Cause.of(Code.ILL_CONDITIONED, variant="open", fp32=fp32, sides=sides)
    else:
        size = write_number(float(exact.pair.abs_diff.mean()))
        why = str(measured).removesuffix(".")
        cause = Cause.of(Code.ILL_CONDITIONED, variant="unmeasured", size=size, why=why)
    return Verdict(kind="undecided", **cause.model_dump())


def _what_is_open(case: Case, disagreement: Disagreement) -> str:
    """How large the difference is, and what it may be; where the KL grows over the steps of a log, of the last ones."""
    if case.growth is not None and case.growth.last_abs_diff is not None:
        return _size_at_last(case.growth, case.growth.last_abs_diff, case, disagreement)
    if not case.has_run:
        may_be = "log-probs of these formats alone do not tell rounding from a bug"
    elif case.is_logged:
        may_be = "a log alone does not tell rounding from a bug"
    else:
        may_be = "without an FP32 pair it may be a bug"
    return f"The sides differ by KL {write_estimate(case.metrics['kl_k3']).value} a token; {may_be}."


def _size_at_last(growth: StepGrowth, mean: Estimate, case: Case, disagreement: Disagreement) -> str:
    """Whether rounding was seen to make what the last steps of a log have; that it can is left open here."""
    dtypes = _formats(case, disagreement)
    usual = f"{usual_nats(*dtypes):.3g}"
    of_formats = f"rounding in {_names_of_formats(dtypes)}"
    if mean.value <= usual_nats(*dtypes):
        may_be = f"a size that {of_formats} has too (up to {usual} where it was measured)"
    else:
        most = f"{most_by_rounding(dtypes, disagreement.conditioning):.3g}"
        may_be = f"more than {of_formats} made where it was measured ({usual}), less than the most it can make ({most})"
    return f"At {last_steps(growth)} mean abs(d) is {write_estimate(mean).value} nats a token, {may_be}."


def _length_evidence(case: Case) -> list[str]:
    if case.length is None or case.length.budget_tokens is None or case.growth is not None:
        return []
    budget = case.length.budget_tokens
    number = write_tokens(budget).in_words("tokens", budget.level)
    rare = "; tokens too rare for this sample may make it shorter" if case.length.budget_tail_is_open else ""
    place = "extrapolated beyond" if case.length.longest_budget_is_extrapolated else "inside"
    median = write_token_count(case.length.median_response)
    return [
        f"length budget at ESS {case.length.budget_ess:g}: {number}, {place} the "
        f"{write_token_count(case.length.measured_up_to)} measured{rare}; median response {median}"
    ]


def _length_advice(case: Case, remedy: str) -> list[str]:
    """None where the KL grows: no dtype fixes what changed on the way, and the budget is of a mean over all steps."""
    if case.length is None or case.length.budget_tokens is None or case.growth is not None:
        return []
    if case.length.budget_tokens.value >= case.length.measured_up_to:
        return []
    budget, is_usual = case.length.budget_tokens, case.length.median_response > case.length.budget_tokens.value
    longest = f"The longest responses ({write_token_count(case.length.measured_up_to)} tokens)"
    length = case.length.median_response if is_usual else case.length.measured_up_to
    are = "are" if budget.high is not None and budget.high < length else "may be"
    who = "Responses" if is_usual else longest
    return [
        f"{who} {are} longer than the length budget: sequence-level importance weights "
        f"lose more than half of their effective sample there; {remedy}."
    ]


def _side_evidence(case: Case) -> list[str]:
    if case.blame is None or case.blame.share_pi is None:
        return []
    return [f"the error against the reference is {where_the_error_is(case.blame.share_pi)}"]


def where_the_error_is(share: Estimate) -> str:
    """By the training path's share of the mean squared error, and what is left for the engine."""
    if share.value > DOMINANT_SIDE_SHARE:
        where = "mostly on the training side"
    elif share.value < 1 - DOMINANT_SIDE_SHARE:
        where = "mostly on the engine's side"
    else:
        where = "on both sides"
    return (
        f"{where}: the training path causes {write_percent(share.value)} of it, the engine "
        f"{write_percent(1 - share.value)} (shares of the mean square)"
    )


NOT_SHOWN: Final = ", which these numbers do not show"


def with_known_differences(case: Case, verdict: Verdict) -> Verdict:
    """A verdict that names no bug, with known differences and a start that prompts lack as evidence: they are facts.

    They come before what the numbers show, with what would fix them as advice.
    """
    if verdict.kind in ("bug", "broken"):
        return verdict
    facts = (*TEXT, PROMPT_START)
    of_settings = [finding for finding in case.preflight if finding.level == "error" or finding.setting in facts]
    return verdict.model_copy(
        update={
            "evidence": [*(f"{finding.what}{NOT_SHOWN}" for finding in of_settings), *verdict.evidence],
            "advice": [*verdict.advice, *(finding.advice for finding in of_settings)],
        }
    )


def known_differences(verdicts: Sequence[Verdict], preflight: Sequence[SettingFinding]) -> list[SettingFinding]:
    """Those that `with_known_differences` put into any of these verdicts."""
    evidence = {line for verdict in verdicts for line in verdict.evidence}
    return [finding for finding in preflight if f"{finding.what}{NOT_SHOWN}" in evidence]
