"""A run in a sentence and in one row a pair of sides, for the terminal and the page."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Final

from markupsafe import Markup

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import side_label
from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    capital,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_share,
    write_token_count,
    write_tokens,
    write_value,
)
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.records.findings import Document
from mismatch_probe.records.summary import Contrast, Counts, PairSummary, SettingsContrast, Summary
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.view import Badge, Cell, Column, Table
from mismatch_probe.stats.catalogue import metric_words
from mismatch_probe.stats.results import Blame, Estimate
from mismatch_probe.stats.tails import most_pareto_k
from mismatch_probe.verdict.departures import conditioning_words
from mismatch_probe.verdict.headline import foremost, grows, headline, measures_precision
from mismatch_probe.verdict.preflight.facts import AGREEMENT
from mismatch_probe.verdict.preflight.weights import TEXT
from mismatch_probe.verdict.rounding import NOT_SHOWN, few_tokens_words, noise_sentences, where_the_error_is
from mismatch_probe.verdict.settings import rounding_words, settings_answer, what_changes

NOT_FITTED: Final = "not fitted, but from the KL alone"
"""Of a length budget; the table of the length law, at LAW_ANCHOR of a page, says how."""
LAW_ANCHOR: Final = "length-law"
_OPEN: Final = "‡"
_REFERENCE: Final = "ref."
"""In place of an error of 0: that side is the reference."""


def pairs_table(summary: Summary) -> Table:
    """A column that no pair has a value for is left out; broken data has the verdict alone: it measures nothing."""
    columns: list[Column[PairSummary]] = [
        Column("pair", pair_label),
        Column("verdict", Badge.of_pair, is_text=True),
    ]
    numbers: list[Column[PairSummary]] = [
        Column("mean |d|", _difference_cell, can_lack_interval=True),
        Column("KL (k3)", _kl_cell),
        Column("length budget", budget),
        Column("rms pi / mu", _error_cell),
    ]
    columns += [column for column in numbers if any(str(column.cell(pair)) != ABSENT for pair in summary.pairs)]
    return Table.of("One row a pair of sides", summary.pairs, columns, is_stacked=True)


def _difference_cell(pair: PairSummary) -> Cell:
    return ABSENT if _is_broken(pair) else write_estimate(pair.metrics.get("abs_logprob_diff"))


def _is_broken(pair: PairSummary) -> bool:
    return pair.verdict.kind == "broken"


def _error_cell(pair: PairSummary) -> Cell:
    """How far pi and mu are from the reference."""
    if _is_broken(pair):
        return ABSENT
    sides = [write_estimate(getattr(pair.blame, f"rms_error_{side}", None)).value for side in ("pi", "mu")]
    if sides[0] == "0" and not pair.train_dtype.rounds_coarsely:
        sides[0] = _REFERENCE
    if sides == [ABSENT, ABSENT]:
        return ABSENT
    return Markup('<span class="whole"><b>{}</b> / <b>{}</b></span>').format(*sides)


def budget(pair: PairSummary) -> WrittenNumber:
    """The length budget in tokens, with a mark for how it was made: a dagger by the closed form, where it could not be
    fitted; a star beyond the data, however it was made; a double dagger where it is at most so long.

    A bug has none: it is there to be fixed, not to be lived with up to some length. Nor has a KL that grows over the
    steps of a log, whose mean over all of them is that of no step.
    """
    law = pair.length
    if law is None or not measures_precision(pair.verdict) or grows(pair):
        return WrittenNumber(ABSENT)
    if law.budget is None:
        return WrittenNumber(ABSENT)
    marks = [
        "*" if law.is_extrapolated else "",
        "†" if law.budget_tokens is None else "",
        _OPEN if law.budget_tail_is_open else "",
    ]
    return _with_mark(write_tokens(law.budget), "".join(marks))


def _kl_cell(pair: PairSummary) -> WrittenNumber:
    """KL (k3), with a double dagger where rare tokens may add more than its interval reaches."""
    estimate = None if _is_broken(pair) else pair.metrics.get("kl_k3")
    return _with_mark(write_estimate(estimate), _OPEN if estimate is not None and estimate.tail_is_open else "")


def _with_mark(number: WrittenNumber, mark: str) -> WrittenNumber:
    return WrittenNumber(f"{number.value}{mark}", number.interval)


def table_footnote(summary: Summary) -> str:
    """How to read the columns that do not say it; empty where they hold nothing."""
    errors = (
        "rms pi / mu: how far the log-probs of the training path (pi) and of the engine (mu) lie from the reference's, "
        "in nats"
    )
    if any(_REFERENCE in str(_error_cell(pair)) for pair in summary.pairs):
        errors += f"; {_REFERENCE}: that side is the reference itself"
    notes = [
        _budget_footnote(summary),
        _open_footnote(summary),
        errors if any(_error_cell(pair) != ABSENT for pair in summary.pairs) else "",
    ]
    return "; ".join(note for note in notes if note)


def _budget_footnote(summary: Summary) -> str:
    """How to read the length budget, with the range behind it; empty where no pair has one."""
    laws = [pair.length for pair in summary.pairs if pair.length and budget(pair).value != ABSENT]
    if not laws:
        return ""
    longest = write_count(max(law.measured_up_to for law in laws))
    meaning = "length budget: the response length, in tokens, at which sequence-level importance sampling has an ESS of"
    notes = [f"{meaning} {laws[0].budget_ess:g}"]
    if any(law.is_extrapolated for law in laws):
        notes.append(f"* extrapolated beyond the longest response measured, {longest} tokens")
    if any(law.budget_tokens is None for law in laws):
        notes.append(f"† {NOT_FITTED}")
    return "; ".join(notes)


def _open_footnote(summary: Summary) -> str:
    """What the double dagger says; empty where none stands."""
    numbers = [value for pair in summary.pairs for value in (_kl_cell(pair).value, budget(pair).value)]
    if not any(_OPEN in value for value in numbers):
        return ""
    sooner = ", and end the budget sooner" if _budget_footnote(summary) else ""
    return f"{_OPEN} what is too rare for this sample may raise the KL above its interval{sooner}"


def contrast_sentences(summary: Summary) -> list[str]:
    """`KL (k3) of BF16 is 62 [50, 77] times that of FP16`: the larger over the smaller; none where a pair of dtypes
    is a bug or broken.
    """
    if not all(measures_precision(pair.verdict) for pair in summary.pairs if pair.is_of_dtypes):
        return []
    return [_contrast_sentence(contrast) for contrast in summary.contrasts if contrast.ratio.value >= 1]


def _contrast_sentence(contrast: Contrast) -> str:
    of, divisor = contrast.of.upper(), contrast.over.upper()
    return f"{metric_words(contrast.metric)} of {of} is {write_estimate(contrast.ratio)} times that of {divisor}"


def left_out_sentences(summary: Summary) -> list[str]:
    """A sentence for each side that was asked for and could not be computed."""
    return [f"Left out: {side_label(name)}. {reason}" for name, reason in summary.left_out.items()]


def reference_sentences(summary: Summary) -> list[str]:
    """Why the reference is left out where it contradicts itself."""
    findings = [finding for finding in summary.preflight if finding.setting == AGREEMENT]
    return [f"{finding.what[0].upper()}{finding.what[1:]}." for finding in findings]


def settings_sentences(summary: Summary) -> list[str]:
    """What each side's own settings change, where their counterpart has no bug."""
    verdicts = {(pair.train, pair.infer): pair.verdict for pair in summary.pairs}
    of_text = {f"{finding.what}{NOT_SHOWN}" for finding in summary.preflight if finding.setting in TEXT}
    return [
        f"{pair_label(pair)}: {', '.join(contrast.settings)}; {_settings_words(pair, contrast, of_text)}"
        for pair in summary.pairs
        if (contrast := pair.settings_contrast) is not None
        and pair.verdict.kind != "broken"
        and measures_precision(verdicts[contrast.counterpart])
    ]


def _settings_words(pair: PairSummary, contrast: SettingsContrast, of_text: Set[str]) -> str:
    """What they cost, whether rounding explains it, and which of the differences `of_text`, which no number shows, the
    checkpoints have; of a pair that has another verdict only how it compares.
    """
    if pair.verdict.code != Code.SETTINGS:
        return what_changes(contrast)
    not_shown = [line for line in pair.verdict.evidence if line in of_text]
    return "; ".join([f"{settings_answer(pair, contrast)}{rounding_words(contrast)}", *not_shown])


def few_tokens_sentences(summary: Summary) -> list[str]:
    """Which few tokens hold half of a pair's KL; of a clean pair it is half of nothing, and broken data has none."""
    return [
        f"{pair_label(pair)}: {few_tokens_words(pair.few_tokens)}"
        for pair in summary.pairs
        if pair.few_tokens is not None and pair.verdict.kind not in ("clean", "broken")
    ]


_SURE_ERRORS: Final = 3.3
"""Standard errors off 1 that chance brings in one healthy sample of 1,000; in one of 20 it brings 1.96."""


def disagreement_sentences(summary: Summary) -> list[str]:
    """Where numbers seem to contradict each other, and why they need not: two estimates of one KL, each unbiased on
    draws from mu, with intervals that do not meet, and a mean weight whose interval leaves 1 out.
    """
    return [
        f"{pair_label(pair)}: {sentence}"
        for pair in summary.pairs
        if pair.verdict.kind in _OF_PRECISION
        for sentence in (*_estimates_apart(pair), *_weights_off_one(pair))
    ]


def _estimates_apart(pair: PairSummary) -> Iterator[str]:
    """k3 is k1 plus the mean ratio less 1, token by token: they differ by what that ratio lacks of 1."""
    first, second = pair.metrics.get("kl_k1"), pair.metrics.get("kl_k3")
    if first is None or second is None or not _are_apart(first, second):
        return
    ratio = pair.metrics.get("is_ratio_mean_token")
    if ratio is not None:
        lack = f"they differ by the mean ratio of a token less 1, and that ratio is {write_estimate(ratio)}"
    else:
        lack = "they differ by the mean ratio of a token less 1"
    yield (
        f"k1 and k3 estimate one KL, and their intervals do not meet ({write_estimate(first)} and "
        f"{write_estimate(second)}): {lack}, where draws from mu give 1. {_why_off_one(pair, ratio)}"
    )


def _why_off_one(pair: PairSummary, ratio: Estimate | None) -> str:
    """What moves the mean ratio of tokens off 1."""
    few = ""
    if pair.few_tokens is not None:
        few = f"A few tokens do it where d has so heavy a tail ({few_tokens_words(pair.few_tokens)}); else "
    if ratio is not None and _may_be_chance(ratio):
        why = "so close to 1 it may be chance, as in 1 of 20 samples of healthy data: more prompts tell"
    elif ratio is not None and ratio.high is not None and ratio.high < 1:
        why = (
            "tokens are absent that pi finds likelier than mu, as where mu samples from a cut vocabulary (top-p, top-k)"
        )
    else:
        why = "the tokens are not draws from mu, or the two sides do not normalise over the same tokens"
    return f"{few}{why}." if few else f"{capital(why)}."


def _may_be_chance(ratio: Estimate) -> bool:
    error = ratio.standard_error
    return error is not None and abs(ratio.value - 1) < _SURE_ERRORS * error


def _weights_off_one(pair: PairSummary) -> Iterator[str]:
    """The mean weight of whole responses, where that of tokens gives no reason to be off."""
    weight, ratio = pair.metrics.get("is_ratio_mean_seq"), pair.metrics.get("is_ratio_mean_token")
    if weight is None or ratio is None or weight.high is None or weight.high >= 1 or not _holds_one(ratio):
        return
    yield (
        f"the mean weight of a whole response is {write_estimate(weight)} and not 1, though that of a token is "
        f"{write_estimate(ratio)}: no cut vocabulary, but weights exp(S) so skewed that a sample of "
        f"{write_many(weight.num_sequences, 'response')} holds too few of the large ones that would make it 1"
    )


def _holds_one(estimate: Estimate) -> bool:
    return estimate.low is None or estimate.high is None or estimate.low <= 1 <= estimate.high


def _are_apart(first: Estimate, second: Estimate) -> bool:
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return False
    return first.high < second.low or second.high < first.low


def size_sentence(pair: PairSummary) -> str:
    counts = pair.counts
    prompts = "" if counts.num_prompts is None else f" to {write_many(counts.num_prompts, 'prompt')}"
    return f"{write_many(counts.num_tokens, 'token')} in {write_many(counts.num_sequences, 'response')}{prompts}"


def tokens_left_out(counts: Counts) -> str:
    """What is left out of a log's responses, and what of these is measured all the same."""
    if not counts.left_out_tokens:
        return ""
    of_all = write_share(counts.left_out_tokens, counts.left_out_tokens + counts.num_tokens)
    tokens, responses = write_many(counts.left_out_tokens, "token"), write_many(counts.partial_responses, "response")
    in_part = f"; {responses} measured in part, in no number of whole responses" if counts.partial_responses else ""
    surprisal = f"{100 * counts.left_out_surprisal:.3g} % of the surprisal"
    return f". Left out: {tokens} ({of_all}) with {surprisal}{_zeros(counts)}{in_part}"


def _zeros(counts: Counts) -> str:
    if not counts.zeros_for_missing:
        return ""
    are, stand = ("is", "stands") if counts.zeros_for_missing == 1 else ("are", "stand")
    return (
        f"; {write_count(counts.zeros_for_missing)} of them {are} exactly 0 on one side and, by what the other says, "
        f"{stand} for no log-prob"
    )


def level(summary: Summary) -> str:
    """The confidence of the intervals: `95 %`; empty where there is none."""
    levels = {estimate.level for pair in summary.pairs for estimate in pair.metrics.values()}
    return " and ".join(f"{100 * share:g} %" for share in sorted(levels))


def chance(summary: Summary) -> str:
    """How often an interval misses the truth by chance: `5 %`."""
    levels = {estimate.level for pair in summary.pairs for estimate in pair.metrics.values()}
    return " and ".join(f"{100 * (1 - share):.3g} %" for share in sorted(levels))


_OF_PRECISION: Final = ("precision", "undecided")


def short_answer(summary: Summary) -> str:
    """The headline in the present words, of runs of earlier versions too."""
    return headline(summary.pairs, summary.contrasts, summary.preflight)


def terms(summary: Summary, documents: Sequence[Document]) -> list[tuple[str, str]]:
    """What an engineer asks of the worst pair, each under a word or two: how long responses may be, whether an ESS can
    be believed, who errs, whether FP16 fits where that was measured. `documents` are those of other commands.
    """
    pair = foremost(summary.pairs)
    usable_terms = [*_budget_terms(pair), *_blame(pair)] if pair.verdict.kind in _OF_PRECISION else []
    noise = "; ".join(noise_sentences(pair.blame))
    return [
        *usable_terms,
        *([] if pair.conditioning is None else [("FP32 and FP64", conditioning_words(pair.conditioning))]),
        *([("Own noise", noise)] if noise and pair.verdict.kind != "broken" else []),
        *(("FP16", document.verdict.sentence) for document in documents if isinstance(document, Headroom)),
    ]


def _budget_terms(pair: PairSummary) -> Iterator[tuple[str, str]]:
    law, number = pair.length, budget(pair)
    if law is None or law.budget is None or not number.interval:
        return
    yield (
        "Length budget",
        f"{number.in_words('tokens', law.budget.level)} at ESS {law.budget_ess:g}; the responses of this pair have "
        f"{write_token_count(law.median_response)} at the median, {write_token_count(law.measured_up_to)} at most",
    )
    if (tail := weights_tail_words(pair)) is not None:
        yield "Weights", tail


def weights_tail_words(pair: PairSummary) -> str | None:
    """What the Pareto k-hat of the response weights says of their mean and ESS; None where it could not be measured."""
    k_hat = pair.metrics.get("pareto_k_seq")
    if k_hat is None:
        return None
    most = most_pareto_k(k_hat.num_sequences)
    size = f"Pareto k-hat of the response weights {write_number(k_hat.value)}"
    limit = f"{write_number(most)}, the most for {write_many(k_hat.num_sequences, 'response')}"
    if k_hat.value <= most:
        return f"{size}, within {limit}: their mean and ESS can be believed"
    return f"{size}, above {limit}: their mean and ESS hang on the largest weights, which a sample may lack"


def write_independent(blame: Blame) -> str:
    """The rms of d if the two errors were independent, with the digits of the one that was measured."""
    if blame.rms_if_independent is None:
        return ABSENT
    return write_value(replace(blame.rms_difference, value=blame.rms_if_independent))


def _blame(pair: PairSummary) -> Iterator[tuple[str, str]]:
    blame = pair.blame
    if blame is None or blame.share_pi is None:
        return
    yield "Who errs", f"the error against the reference is {where_the_error_is(blame.share_pi)}"
    if blame.rms_if_independent is None or blame.rms_error_pi is None or blame.rms_error_mu is None:
        return
    if min(blame.rms_error_pi.value, blame.rms_error_mu.value) > 0:
        errors = f"{write_value(blame.rms_error_pi)}² + {write_value(blame.rms_error_mu)}²"
        correlation = blame.error_correlation
        between = "" if correlation is None else f"; the two errors correlate by {write_estimate(correlation)}"
        yield (
            "Independence",
            f"two independent errors would make rms d √({errors}) = {write_independent(blame)} nats; "
            f"measured is {write_estimate(blame.rms_difference)}{between}",
        )
