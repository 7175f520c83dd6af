"""Two columns of log-probs become a comparison: the estimates, length law and verdict that a run would get."""

from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.api.comparison import Comparison
from mismatch_probe.arrays import ArrayLike, Layout, is_unrecorded
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.summary import Counts, PairSummary, Summary
from mismatch_probe.stats.blame import blame
from mismatch_probe.stats.confidence import confidence_bins
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.figures import error_histograms, probability_scatter
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import LEAST_SAMPLED, MOST_ROUNDED_UP, Floats, Sequences, TokenPair, is_usable
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.equal_legs import is_copy, source_of_reference
from mismatch_probe.verdict.floors import rounding_floor
from mismatch_probe.verdict.headline import headline
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.signatures.disagreement import Disagreement

_NAME: Final = ("pi", "mu")


def compare_logprobs(
    log_pi: ArrayLike,
    log_mu: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    log_ref: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    prompt_ids: ArrayLike | None = None,
    train_dtype: str = Dtype.BF16,
    infer_dtype: str = Dtype.BF16,
    computed_apart: bool = False,
    level: float = 0.95,
) -> Comparison:
    """The training policy pi against the policy mu that sampled, on the same tokens.

    log_pi, log_mu: log-probs of the sampled tokens in nats, raw and at the temperature of sampling: arrays [B, T],
    lists of 1-D arrays, or tensors. mask: 1 where a token was sampled, or True where every row is full. Arrays [B, T]
    need one; all tokens of lists count without it, and what a numpy masked array hides never does. log_ref: of the same
    policy in FP32. entropy: of pi's distribution at each token, nats; it tells a temperature. prompt_ids: what tells
    prompts apart, one value or one row of token ids a response [B]: intervals cluster by it, and responses to one
    prompt that are taken for independent make them too narrow. train_dtype, infer_dtype: of each side's arithmetic.
    computed_apart: each side and log_ref was computed by itself, so that equal bits are no copy. level: of the
    intervals.

    Raises:
        UsageError: the arrays are not of the same tokens, no token counts, or one of them holds no log-probs.
    """
    train, infer = _dtype(train_dtype, "train_dtype"), _dtype(infer_dtype, "infer_dtype")
    if not isinstance(level, float | np.floating) or not 0 < level < 1:
        raise UsageError(f"level {level!r:.40} is none of an interval: give one between 0 and 1, such as 0.95")
    if not isinstance(computed_apart, bool | np.bool_):
        raise UsageError(f"computed_apart is {computed_apart!r:.40}: give True where each was computed, else False")
    layout = Layout.of(log_pi, mask, "log_pi", log_mu, log_ref, entropy)
    pi = _log_probs(layout, log_pi, "log_pi")
    mu = _log_probs(layout, log_mu, "log_mu")
    if never_sampled := int((mu <= LEAST_SAMPLED).sum()):
        raise UsageError(
            f"log_mu is {LEAST_SAMPLED:g} or lower at {write_count(never_sampled)} of {write_count(mu.size)} tokens, "
            "and no sampler draws such a token: give the log-probs of the tokens that were sampled, or leave these out "
            "of the mask"
        )
    lengths = layout.lengths
    prompts = None if prompt_ids is None else layout.groups(prompt_ids, "prompt_ids")[lengths > 0]
    pair = TokenPair(
        Sequences.of_lengths(lengths[lengths > 0], prompts),
        pi,
        mu,
        None if log_ref is None else _log_probs(layout, log_ref, "log_ref"),
        entropy_pi=None if entropy is None else _entropies(layout, entropy),
    )
    if is_copy(pair, (train, infer), say_whose_they_are=computed_apart):
        raise UsageError(
            f"log_pi equals log_mu bit for bit in all {write_count(pi.size)} tokens, as where a trainer copies the "
            "sampler's: give log-probs that the trainer computed, or computed_apart=True where both sides were"
        )
    source = source_of_reference(pair, (train, infer), say_whose_they_are=computed_apart)
    if source is not None:
        raise UsageError(
            f"log_ref equals log_{source} bit for bit in all {write_count(pi.size)} tokens, and FP32 rounds otherwise "
            "than 16 bits, so it is a copy: give log-probs of the same policy in FP32, or leave log_ref out; or "
            "computed_apart=True where each was computed"
        )
    return Comparison(_summary(pair, train, infer, level, computed_apart=computed_apart))


def _dtype(name: str, argument: str) -> Dtype:
    if not isinstance(name, str) or name not in list(Dtype):
        hint = did_you_mean(name, Dtype, f"; give one of {', '.join(Dtype)}")
        raise UsageError(f"{argument} {name!r:.40} is no number format{hint}")
    return next(dtype for dtype in Dtype if dtype == name)


def _log_probs(layout: Layout, values: ArrayLike, name: str) -> Floats:
    flat = layout.log_probs(values, name, "log_pi")
    if not flat.size:
        raise UsageError("no token counts, so there is nothing to compare: look at the mask and at the responses")
    if is_unrecorded(flat):
        raise UsageError(f"{name} is 0 everywhere, so it was not recorded: switch its recording on where it is written")
    missing = int((~is_usable(flat)).sum())
    if missing:
        raise UsageError(
            f"{name} holds no log-prob at {write_count(missing)} of {write_count(flat.size)} tokens (NaN, infinite, or "
            "-9999 and less): find why, or leave these tokens out of the mask"
        )
    if flat.max() > MOST_ROUNDED_UP:
        raise UsageError(
            f"{name} reaches {write_number(float(flat.max()))}, and no log-prob is above 0: give natural "
            "log-probs, not logits or negated ones"
        )
    return flat


def _entropies(layout: Layout, values: ArrayLike) -> Floats:
    flat = layout.flat(values, "entropy", "log_pi")
    if not np.isfinite(flat).all() or flat.min() < -MOST_ROUNDED_UP:
        raise UsageError(
            "entropy holds what is no entropy: give that of pi's distribution at each token, in nats, at least 0"
        )
    return flat


def _summary(pair: TokenPair, train: Dtype, infer: Dtype, level: float, *, computed_apart: bool) -> Summary:
    metrics, unavailable = pair_metrics(pair, level)
    law, blamed = length_law(pair, level=level), blame(pair, level=level)
    counts = Counts(
        num_sequences=pair.sequences.num_sequences,
        num_prompts=pair.sequences.num_clusters,
        num_tokens=pair.sequences.num_tokens,
        missing_mu=0,
        missing_pi=0,
        nonfinite_mu=0,
        nonfinite_pi=0,
        mismatched_ids=0,
        truncated_responses=0,
    )
    disagreement = Disagreement(pair, train, infer, floor=rounding_floor(pair, train, infer))
    case = Case(
        name=_NAME,
        train_dtype=train,
        infer_dtype=infer,
        applied_train=train,
        applied_infer=infer,
        counts=counts,
        metrics=metrics,
        length=law,
        blame=blamed,
        disagreement=disagreement,
        exact=disagreement if disagreement.is_exact else None,
        legs_say_whose_they_are=computed_apart,
        has_run=False,
    )
    verdict = judge(case)
    summary = PairSummary(
        train=_NAME[0],
        infer=_NAME[1],
        train_dtype=train,
        infer_dtype=infer,
        legs={},
        counts=counts,
        metrics=metrics,
        metrics_unavailable=unavailable,
        length=law,
        blame=blamed,
        confidence=confidence_bins(pair, level=level),
        scatter=probability_scatter(pair),
        errors=error_histograms(pair),
        worst_tokens=[],
        corrections=simulate_corrections(pair, level=level),
        verdict=verdict,
    )
    return Summary(
        tool_version=__version__,
        model="arrays",
        model_fingerprint="",
        headline=headline([summary], []),
        verdict=verdict,
        contrasts=[],
        pairs=[summary],
    )
