"""How large a deviation rounding can make at all, before it is asked whether a pair's is rounding.

Measured mean abs(d) in nats a token, of two right sides: BF16 0.002 to 0.035 on dense models, up to 0.064 on mixtures
of experts and on a model cut to four layers; 0.18 rms with a KV cache in FP8; FP16 an eighth of BF16 (published figures
of seven systems, and tiny random models). The bounds leave a wide margin: what lies beyond is no rounding.
"""

from typing import Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import COARSEST_FIRST, Dtype
from mismatch_probe.notation import write_count, write_estimate, write_many, write_number, write_percent
from mismatch_probe.records.summary import Cause, SettingFinding, Verdict
from mismatch_probe.stats.results import Estimate, FewTokens
from mismatch_probe.stats.sequences import Reals
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import is_on_grid

USUAL_NATS: Final = 0.064
"""Mean abs(d) in BF16, the largest measured; of other formats by their unit roundoff."""

MOST_NATS: Final = 0.5
"""Mean abs(d) that BF16 can make at most: eight times the largest measured."""

MOST_COMPRESSED_NATS: Final = 0.25
"""That which a KV cache or weights in 8 bit can make under any arithmetic, and which no log declares."""


MOST_NATS_OF_A_TOKEN: Final = 20.0
"""abs(d) of a single token, eighty times the last digit that a logit of 64 has in BF16."""


def most_by_rounding(dtypes: tuple[Dtype, Dtype]) -> float:
    """The largest mean abs(d) (nats) that rounding in these formats of pi and mu can make."""
    coarsest = max(dtype.round_off for dtype in dtypes)
    return max(MOST_NATS * coarsest / Dtype.BF16.round_off, MOST_COMPRESSED_NATS)


def beyond_rounding(case: Case, disagreement: Disagreement) -> list[Cause]:
    """The bug of sides that differ by more than any rounding in their formats; none where FP32 or a known setting says
    what the deviation is, or where it can be rounding.
    """
    mean = case.metrics.get("abs_logprob_diff")
    if mean is None or case.exact is not None or _roundings(case):
        return []
    most = most_by_rounding(_formats(case, disagreement))
    formats = _names(_formats(case, disagreement))
    abs_diff = disagreement.pair.abs_diff
    num_far = int((abs_diff > MOST_NATS_OF_A_TOKEN).sum())
    if _surely(mean) > most:
        what = (
            f"mean abs(d) is {write_estimate(mean)} nats a token; rounding in {formats} explains at most "
            f"{write_number(most)} of it, {write_percent(most / mean.value)}"
        )
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
    else:
        return []
    figures = {"sides": "the two sides differ", "formats": formats, "look_for": look_for}
    return [Cause.of(Code.BEYOND_FORMAT, [what], variant="rounding", **figures)]


def beside_usual(case: Case, disagreement: Disagreement) -> str:
    """The deviation beside what rounding in the pair's formats was measured to make."""
    mean, dtypes = case.metrics["abs_logprob_diff"], _formats(case, disagreement)
    usual = USUAL_NATS * max(dtype.round_off for dtype in dtypes) / Dtype.BF16.round_off
    return (
        f"mean abs(d) is {write_estimate(mean)} nats a token; rounding in "
        f"{_names(dtypes)} made {write_number(usual)} at most where it was measured, and cannot make more than "
        f"{write_number(most_by_rounding(dtypes))}"
    )


def with_few_tokens(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what few tokens do to its numbers in its evidence; one of clean data needs none."""
    if case.few_tokens is None or verdict.kind == "clean":
        return verdict
    return verdict.model_copy(update={"evidence": [*verdict.evidence, few_tokens_words(case.few_tokens)]})


def few_tokens_words(few: FewTokens) -> str:
    """How many there are, what they hold, where the largest stands, and which are exact zeros."""
    many = few.num_tokens > 1
    held = (
        f"{write_many(few.num_tokens, 'token')} of {write_count(few.of_tokens)} {'hold' if many else 'holds'} "
        f"{write_percent(few.share_of_kl)} of the KL (k3): {'the largest' if many else 'it'} stands at position "
        f"{few.position} of {few.response}, with log pi {write_number(few.log_pi)} and log mu "
        f"{write_number(few.log_mu)}"
    )
    sides = ((few.zeros_mu, "the sampler's side"), (few.zeros_pi, "the trainer's side"))
    subjects = [
        (f"{count} of them" if many else "it", "are" if count > 1 else "is", side) for count, side in sides if count
    ]
    zeros = [f"{subject} {verb} exactly 0 on {side}" for subject, verb, side in subjects]
    return "; ".join([held, *zeros])


def _roundings(case: Case) -> list[SettingFinding]:
    """Settings known to round one side."""
    return [
        finding for finding in case.preflight if finding.level == "warning" and finding.code == Code.ONE_SIDED_DTYPE
    ]


def _formats(case: Case, disagreement: Disagreement) -> tuple[Dtype, Dtype]:
    """Of pi and mu: as declared, or as the grid shows on which all of a side's log-probs lie, where that is coarser."""
    declared = (case.train_dtype, case.infer_dtype)
    legs = (disagreement.pair.log_pi, disagreement.pair.log_mu)
    pi, mu = (_coarser(dtype, leg) for dtype, leg in zip(declared, legs, strict=True))
    return pi, mu


def _coarser(declared: Dtype, leg: Reals) -> Dtype:
    shown = next((dtype for dtype in COARSEST_FIRST if is_on_grid(leg, dtype)), declared)
    return max(declared, shown, key=lambda dtype: dtype.round_off)


def _names(dtypes: tuple[Dtype, Dtype]) -> str:
    return " and ".join(dict.fromkeys(dtype.upper() for dtype in dtypes))


def _surely(estimate: Estimate) -> float:
    """The lower bound; of a single response, which has none, the value."""
    return estimate.value if estimate.low is None else estimate.low
