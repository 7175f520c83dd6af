"""Two columns of log-probs become a comparison: the estimates, length law and verdict that a run would get."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.api.comparison import Comparison
from mismatch_probe.arrays import ArrayLike, LabelsLike, Layout, is_unrecorded
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.notation import write_count, write_many, write_number, write_percent
from mismatch_probe.records.summary import Counts, PairSummary, Summary
from mismatch_probe.stats.bases import base_of_entropies
from mismatch_probe.stats.bins import confidence_bins
from mismatch_probe.stats.copies import CopiedRows, RowCopyTotals, row_totals
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.estimator import blame
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import LEVEL
from mismatch_probe.stats.sequences import (
    LEAST_SAMPLED,
    MOST_ROUNDED_UP,
    Floats,
    Ints,
    Mask,
    Reals,
    Sequences,
    TokenPair,
    is_usable,
    of_sampled_tokens,
)
from mismatch_probe.stats.worst_responses import error_histograms, few_tokens, probability_scatter
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS, LeftOutTotals, sides_without_zeros, zeros_for_missing
from mismatch_probe.verdict.case import Case, copy_of, source_of_reference, where_equal
from mismatch_probe.verdict.departures import rounding_floor
from mismatch_probe.verdict.headline import headline
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.signatures.profile import Disagreement

_NAME: Final = ("pi", "mu")


def compare_logprobs(
    log_pi: ArrayLike,
    log_mu: ArrayLike,
    mask: ArrayLike | bool | None = None,
    *,
    log_ref: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    prompt_ids: LabelsLike | None = None,
    train_dtype: str = Dtype.BF16,
    infer_dtype: str = Dtype.BF16,
    computed_apart: bool = False,
    level: float = LEVEL,
) -> Comparison:
    """The training policy pi against the policy mu that sampled, on the same tokens.

    A token that lacks a value in one of the arrays is left out, where such tokens are at most 5 % of all, by number and
    by surprisal (one without a log-prob on either side counts as the rarest); the summary's counts say how many.

    Args:
        log_pi: Log-probs of the sampled tokens under pi, in nats, raw and at the temperature of sampling: arrays
            [B, T], lists of 1-D arrays, or tensors.
        log_mu: Those of the same tokens under mu.
        mask: 1 where a token was sampled, or True where every row is full. Arrays [B, T] need one; without it all
            tokens of lists count, and what a numpy masked array hides never does.
        log_ref: Log-probs of the same policy in FP32.
        entropy: The entropy of pi's distribution at each token, nats; it shows a temperature.
        prompt_ids: The prompt of each response [B], one value or one row of token ids. Intervals cluster by it:
            responses to one prompt that count as independent make them too narrow.
        train_dtype: The dtype of pi's arithmetic, such as `bf16`.
        infer_dtype: The dtype of mu's.
        computed_apart: Whether each side and log_ref was computed by itself, so that equal bits are not a copy.
        level: The level of the intervals.

    Raises:
        UsageError: The arrays are not of the same tokens, no token counts, or one of them has no log-probs, or too
            few.
    """
    train, infer = _checked_dtype(train_dtype, "train_dtype"), _checked_dtype(infer_dtype, "infer_dtype")
    if not isinstance(level, float | np.floating) or not 0 < level < 1:
        raise UsageError(f"level {level!r:.40} is none of an interval: give one between 0 and 1, such as 0.95")
    if not isinstance(computed_apart, bool | np.bool_):
        raise UsageError(f"computed_apart is {computed_apart!r:.40}: give True where each was computed, else False")
    layout = Layout.of(log_pi, mask, "log_pi", log_mu, log_ref, entropy)
    pi, mu = (
        _checked_log_probs(layout, log_pi, "log_pi"),
        of_sampled_tokens(_checked_log_probs(layout, log_mu, "log_mu")),
    )
    ref = None if log_ref is None else _checked_log_probs(layout, log_ref, "log_ref")
    entropies = None if entropy is None else _checked_entropies(layout, entropy)
    lengths = layout.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths[lengths > 0])])
    _require_recorded(pi, mu, ref, offsets)
    with_zeros = pi, mu
    pi, mu = sides_without_zeros(pi, mu, offsets)
    zeros = np.logical_or(
        *(np.isnan(usable_side) & (side == 0) for side, usable_side in zip(with_zeros, (pi, mu), strict=True))
    )
    columns = _present_columns(log_pi=pi, log_mu=mu, log_ref=ref, entropy=entropies)
    left_out, usable = _require_few_left_out(columns)
    prompts = None if prompt_ids is None else layout.groups(prompt_ids, "prompt_ids")[lengths > 0]
    base = None if entropies is None else base_of_entropies(pi[usable], entropies[usable])
    if base is not None and base.column == "entropy":
        warnings.warn(
            f"entropy looks like logarithms to {base.name} beside the mean of -log_pi, and shows no temperature: "
            f"give nats, that are these times ln {base.base}",
            stacklevel=2,
        )
    if not computed_apart and (train.rounds_coarsely or infer.rounds_coarsely):
        usable &= ~_is_in_copied_row(pi, mu, lengths[lengths > 0])
    sequences = Sequences.of_lengths(lengths[lengths > 0], prompts).of_usable_tokens(usable)
    assert sequences is not None, "few tokens are left out"
    pair = TokenPair(
        sequences,
        pi[usable],
        mu[usable],
        None if ref is None else ref[usable],
        entropy_pi=None if entropies is None else entropies[usable],
    )
    copies = copy_of(pair, (train, infer), are_identified=computed_apart)
    if copies is not None:
        raise UsageError(
            f"log_pi equals log_mu bit for bit {where_equal(copies)}, as where a trainer copies the engine's: give "
            "log-probs that the trainer computed, or computed_apart=True where both sides were"
        )
    source = source_of_reference(pair, (train, infer), are_identified=computed_apart)
    if source is not None:
        side, copies = source
        raise UsageError(
            f"log_ref equals log_{side} bit for bit {where_equal(copies)}, and FP32 rounds otherwise "
            "than 16 bits, so it is a copy: give log-probs of the same policy in FP32, or leave log_ref out; or "
            "computed_apart=True where each was computed"
        )
    counts = Counts(
        num_sequences=sequences.num_sequences,
        num_prompts=sequences.num_clusters,
        num_tokens=sequences.num_tokens,
        missing_mu=int(np.isnan(mu).sum()),
        missing_pi=int(np.isnan(pi).sum()),
        nonfinite_mu=0,
        nonfinite_pi=0,
        mismatched_ids=0,
        truncated_responses=0,
        left_out_tokens=int(left_out.out),
        left_out_surprisal=left_out.of_surprisal,
        partial_responses=0 if sequences.complete is None else int((~sequences.complete).sum()),
        zeros_for_missing=int(zeros.sum()),
    )
    rows = np.flatnonzero(lengths > 0)[np.add.reduceat(usable, offsets[:-1], dtype=np.int64) > 0]
    return Comparison(_summary_of_pair(pair, counts, rows, train, infer, level, computed_apart=computed_apart))


def _is_in_copied_row(pi: Floats, mu: Floats, lengths: Ints) -> Mask:
    """The mask of the tokens [T] of responses whose sides are copies where others were computed; warns of them."""
    rows = np.repeat(np.arange(lengths.size), lengths)
    totals = row_totals(pi, mu, rows, lengths.size)
    of_rows = RowCopyTotals.of(totals)
    is_copied = CopiedRows(of_rows.others, of_rows.short.are_copies).among(totals)
    if is_copied.any():
        equal = write_many(of_rows.short.undecided, "other")
        short = f" ({equal} that are equal too are too short to tell)" if of_rows.short.undecided else ""
        warnings.warn(
            f"log_pi equals log_mu bit for bit in {write_count(int(is_copied.sum()))} of {write_count(lengths.size)} "
            f"responses: these are left out, as copies{short}; give log-probs that the trainer computed, or "
            "computed_apart=True where both sides were",
            stacklevel=3,
        )
    return is_copied[rows]


def _checked_dtype(name: str, argument: str) -> Dtype:
    if not isinstance(name, str) or name not in list(Dtype):
        hint = did_you_mean(name, Dtype, f"; give one of {', '.join(Dtype)}")
        raise UsageError(f"{argument} {name!r:.40} is no number format{hint}")
    return next(dtype for dtype in Dtype if dtype == name)


def _checked_log_probs(layout: Layout, values: ArrayLike, name: str) -> Floats:
    flat = layout.log_probs(values, name, "log_pi")
    if not flat.size:
        raise UsageError("no token counts, so there is nothing to compare: look at the mask and at the responses")
    if infinite := int(np.isinf(flat).sum()):
        raise UsageError(
            f"{name} is infinite at {write_count(infinite)} of {write_count(flat.size)} tokens, and no log-prob of a "
            "token that was sampled is: find why, or leave these tokens out of the mask"
        )
    flat = np.where(is_usable(flat), flat, np.nan)
    if np.nanmax(flat, initial=-np.inf) > MOST_ROUNDED_UP:
        raise UsageError(
            f"{name} reaches {write_number(float(np.nanmax(flat)))}, and no log-prob is above 0: give natural "
            "log-probs, not logits or negated ones"
        )
    return flat


def _checked_entropies(layout: Layout, values: ArrayLike) -> Floats:
    flat = layout.flat(values, "entropy", "log_pi")
    if np.isinf(flat).any() or np.nanmin(flat, initial=np.inf) < -MOST_ROUNDED_UP:
        raise UsageError(
            "entropy holds what is no entropy: give that of pi's distribution at each token, in nats, at least 0"
        )
    return flat


def _require_recorded(pi: Floats, mu: Floats, ref: Floats | None, offsets: Ints) -> None:
    """
    Raises:
        UsageError: a side is 0 everywhere, and the other side refutes it or is 0 everywhere too.
    """
    sides = [("log_mu", mu, pi), ("log_pi", pi, mu), *(() if ref is None else [("log_ref", ref, mu)])]
    for name, side, other in sides:
        is_refuted = bool(zeros_for_missing(side, other, offsets).all()) and not side.any()
        if is_refuted or (is_unrecorded(side) and is_unrecorded(other)):
            raise UsageError(
                f"{name} is 0 everywhere, so it was not recorded: switch its recording on where it is written (greedy "
                "sampling gives zeros too; take its log-probs before they are processed)"
            )


def _present_columns(**columns: Reals | None) -> dict[str, Reals]:
    return {name: values for name, values in columns.items() if values is not None}


def _require_few_left_out(columns: Mapping[str, Reals]) -> tuple[LeftOutTotals, Mask]:
    """The totals of the tokens that lack a value (NaN) in one of the columns [T], and the mask of the other tokens.

    Raises:
        UsageError: more tokens lack one than a mean may lack.
    """
    is_missing_in = {name: np.isnan(values) for name, values in columns.items()}
    usable = ~np.logical_or.reduce(list(is_missing_in.values()))
    left_out = LeftOutTotals.of(columns["log_pi"], columns["log_mu"], usable)
    if not left_out.are_few:
        counts = {name: int(where.sum()) for name, where in is_missing_in.items()}
        name = max(counts, key=lambda column: counts[column])
        raise UsageError(
            f"{name} holds no value at {write_count(counts[name])} of {write_count(usable.size)} tokens (NaN, -9999 "
            f"and less, of log_mu {LEAST_SAMPLED:g} and less), where at most {write_percent(MOST_LEFT_OUT_OF_A_PASS)} "
            "of the tokens, and of their surprisal, may lack one (what both sides lack counts as the rarest): find "
            "why, or leave these tokens out of the mask"
        )
    return left_out, usable


def _summary_of_pair(
    pair: TokenPair, counts: Counts, rows: Ints, train: Dtype, infer: Dtype, level: float, *, computed_apart: bool
) -> Summary:
    """Summarise the pair; `rows` [N] are its sequences' rows in the arrays."""

    def place(row: int, position: int) -> tuple[str, int]:
        return f"row {rows[row]}", int(pair.sequences.positions[pair.sequences.offsets[row] + position])

    metrics, unavailable = pair_metrics(pair, level)
    complete_pair = pair.of_whole_responses
    law, error_shares = (
        None if complete_pair is None else length_law(complete_pair, level=level),
        blame(pair, level=level),
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
        blame=error_shares,
        disagreement=disagreement,
        exact=disagreement if disagreement.is_exact else None,
        few_tokens=few_tokens(pair, place),
        legs_are_identified=computed_apart,
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
        blame=error_shares,
        confidence=confidence_bins(pair, level=level),
        scatter=probability_scatter(pair),
        errors=error_histograms(pair),
        worst_tokens=[],
        few_tokens=case.few_tokens,
        corrections=[] if complete_pair is None else simulate_corrections(complete_pair, level=level),
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
