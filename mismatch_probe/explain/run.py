"""A log explained: floors measured, every hypothesis computed, each side judged, then the log."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ExplainSettings, LoggedSide
from mismatch_probe.explain.contexts import SpecialTokens, contexts, rope_base, special_tokens
from mismatch_probe.explain.families import edits, of_distribution
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import (
    Context,
    Family,
    Setup,
    checkpoint_alone,
    declared_weights,
    other_rope,
    other_weights,
    stale_caches,
)
from mismatch_probe.explain.judging import SIDES, Bools, Floats, Judge, LoggedTokens
from mismatch_probe.explain.parts import families_of_parts, fit_parts
from mismatch_probe.explain.passes import rotary_frequencies
from mismatch_probe.explain.predictions import Predictions, coarser_formats, floors_of_formats, other_formats
from mismatch_probe.explain.recorded import agreement_of_experts, parts_sentences, read_parts
from mismatch_probe.explain.search import SideBench, search
from mismatch_probe.explain.sentences import GRAVEST_FIRST, resolution, verdict_of
from mismatch_probe.notation import write_number
from mismatch_probe.records.findings import Explanation, PartsReading, SideExplanation
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.rounding import Floor
from mismatch_probe.stats.sequences import Ints
from mismatch_probe.stats.zeros import SURELY_BELOW_ZERO, NearlySure, filled_with_zeros

FLOOR_NATS: Final = -1000.0
"""vLLM writes -9999; no token that was sampled has less than this."""
_UNCERTAIN_FLOORS: Final = 4.0
_FEWEST_COMPARED: Final = 20
_WRONG_AT_MOST: Final = 0.01


def missing(column: Floats, prediction: Floats, unit: Floats, is_counted: Bools, rows: Ints) -> Bools:
    """Which log-probs are missing [T]. unit: how far rounding moves the predicted ones [T], nats. rows: the response
    of each token [T], rising.
    """
    absent = ~np.isfinite(column) | (column <= FLOOR_NATS)
    uncertain = is_counted & ~absent & (prediction < -_UNCERTAIN_FLOORS * unit)
    zeros = uncertain & (column == 0)
    fillers = zeros & _in_filled_responses(column, prediction, is_counted, rows)
    if 2 * fillers.sum() <= zeros.sum():  # scores of other tokens have zeros anywhere in each response
        absent |= fillers
        zeros, uncertain = zeros & ~fillers, uncertain & ~fillers
    if _mean_nothing(prediction[zeros], column[uncertain & ~zeros], prediction[uncertain & ~zeros]):
        absent |= zeros
    return np.asarray(is_counted & absent)


def _in_filled_responses(column: Floats, prediction: Floats, is_counted: Bools, rows: Ints) -> Bools:
    """Zeros that fill a response, or a stretch of one [T], by `stats.zeros`."""
    fillers = np.zeros(column.shape, dtype=np.bool_)
    nearly_sure = NearlySure.of(column[is_counted], prediction[is_counted])
    for row in np.unique(rows[is_counted & (column == 0) & (prediction < SURELY_BELOW_ZERO)]):
        of_row = np.flatnonzero(is_counted & (rows == row))
        fillers[of_row] = filled_with_zeros(column[of_row], prediction[of_row], nearly_sure)
    return fillers


def _mean_nothing(at_zeros: Floats, others: Floats, at_others: Floats) -> bool:
    """Whether zeros stand at less likely tokens than the largest of the other log-probs do.

    A log-prob of 0 says that its token is the surest of all. Whatever computed the column, a temperature, a cut or
    other weights, such tokens are then at least as likely in the checkpoint's eyes as those that come next.
    """
    if not len(at_zeros) or not len(others):
        return bool(len(at_zeros))
    num_next = min(max(len(at_zeros), _FEWEST_COMPARED), max(1, len(others) // 2))
    comes_next = at_others[np.argpartition(-others, num_next - 1)[:num_next]]
    from scipy.stats import mannwhitneyu

    return bool(mannwhitneyu(at_zeros, comes_next, alternative="less").pvalue <= _WRONG_AT_MOST)


_AGREE_FLOORS: Final = 3.0
"""In units of one side's rounding: the distance of two sides that differ by rounding alone is 1.4."""


def overall(sides: Sequence[SideExplanation], tokens: LoggedTokens) -> Verdict:
    """On the log. Log-probs that are missing are left out of all other results, so a bug in the others comes first."""
    gravest = min((side.verdict for side in sides), key=lambda verdict: GRAVEST_FIRST.index(verdict.kind))
    if gravest.kind == "broken":
        bug = next((verdict for side in sides for verdict in _despite_missing(side) if verdict.kind == "bug"), None)
        if bug is None:
            return gravest
        missing_first = Cause.model_validate(gravest.model_dump(include=set(Cause.model_fields)))
        return bug.model_copy(update={"also": [*bug.also, missing_first]})
    if len(sides) < 2:
        return gravest
    distance = tokens.columns["mu"] - tokens.columns["pi"]
    apart_nats = float(np.sqrt(np.nanmean(distance[tokens.sampled] ** 2)))
    alike = f"the two sides lie {write_number(apart_nats)} nats rms apart, so they agree with each other"
    codes = {side.verdict.code for side in sides}
    if apart_nats > _AGREE_FLOORS * max(side.floor_nats for side in sides) or len(codes) > 1:
        return gravest
    if codes == {str(Code.UNEXPLAINED)}:
        return Verdict(
            kind="undecided",
            code=Code.OTHER_CHECKPOINT,
            sentence="Both sides depart alike from the checkpoint: it is not the one that made this log.",
            evidence=[*gravest.evidence, alike],
            advice=["Give the checkpoint, and the adapter, that the log's step was sampled and trained with."],
        )
    if gravest.kind == "bug":
        return gravest.model_copy(
            update={
                "sentence": f"Both sides depart alike, so it is no mismatch between them. {gravest.sentence}",
                "evidence": [*gravest.evidence, alike],
            }
        )
    return gravest


def _despite_missing(side: SideExplanation) -> Iterator[Verdict]:
    """What a side shows besides log-probs that are missing."""
    if side.verdict.code != Code.MISSING_LOGPROBS:
        yield side.verdict
    elif side.verdict.also:
        first, *others = side.verdict.also
        yield Verdict(kind=Code.by_name(first.code).kind, also=others, **first.model_dump())


ProgressCallback = Callable[[LoggedSide, int, int, str, float | None], None]
"""Hears which side is looked at, its number from 1, how many there are, how far that is, and the seconds left where
these are known; the side that follows asks little that was not computed for the one before.
"""


@dataclass(frozen=True)
class ExplainJob:
    """What a child process needs; it can be pickled."""

    settings: ExplainSettings
    responses: Sequence[LoggedResponse]


def run_explain(job: ExplainJob) -> Explanation:
    """`explain` for a job; raises as it does."""
    return explain(job.settings, job.responses)


def explain(
    settings: ExplainSettings, responses: Sequence[LoggedResponse], tell: ProgressCallback = lambda *progress: None
) -> Explanation:
    """What explains each side of the log; all responses are computed, in this process. `tell` is the progress callback.

    Raises:
        UsageError: the log has nothing to explain, or the checkpoint cannot be used for its ids.
        EngineError: the model cannot be loaded, or not be computed in chunks.
        OutOfMemory: it does not fit.
    """
    tokens = LoggedTokens.of(responses)
    with Predictions.open(settings, tokens) as predictions:
        return explain_with(predictions, settings, tokens, tell)


def explain_with(
    predictions: Predictions,
    settings: ExplainSettings,
    tokens: LoggedTokens,
    tell: ProgressCallback = lambda *progress: None,
) -> Explanation:
    """`explain` by predictions that may have been made for other columns of the same responses; raises as it does."""
    start_seconds = time.monotonic()
    present = [side for side in SIDES if side in tokens.columns]
    special = special_tokens(settings, predictions.declared_model.model)
    explained = [
        _explain_side(side, settings, predictions, tokens, special, partial(tell, side, number, len(present)))
        for number, side in enumerate(present, 1)
    ]
    sides = [side for side, _ in explained]
    return Explanation(
        tool_version=__version__,
        settings=settings,
        num_responses=tokens.num_responses,
        num_tokens=len(tokens.rows),
        sides=sides,
        parts=next((parts for _, parts in explained if parts is not None), None),
        experts=agreement_of_experts(predictions.declared_model, tokens),
        verdict=overall(sides, tokens),
        seconds=time.monotonic() - start_seconds,
    )


def _explain_side(
    side: LoggedSide,
    settings: ExplainSettings,
    predictions: Predictions,
    tokens: LoggedTokens,
    special: SpecialTokens,
    tell: Callable[[str, float | None], None],
) -> tuple[SideExplanation, PartsReading | None]:
    """The side, and of the engine's which weights its parts fit."""
    tell("as declared, and its rounding", None)
    policy = getattr(settings, side)
    context = Context.as_logged(tokens)
    distribution = Distribution.of_policy(policy, tokens.temperature, has_sets=tokens.sets is not None)
    setup = Setup(declared_weights(settings, tokens.responses, side), None, context)
    of_sampling = list(of_distribution(distribution, tokens.temperature))
    of_families = (option.distribution for family in of_sampling for option in family.options)
    with predictions.clock.measure(*predictions.tokens_to_pass([[setup]])):
        predictions.compute(setup, [distribution, *(each for each in of_families if each)])
    exact = predictions.column(setup, distribution)
    of_checkpoint = predictions.column(replace(setup, weights=checkpoint_alone(tokens.num_responses)), distribution)
    errors = {
        dtype: predictions.in_format(dtype, context, distribution) - of_checkpoint
        for dtype in (policy.dtype, *coarser_formats(policy.dtype))
    }
    floors = floors_of_formats(
        {dtype: Floor.measure(error, of_checkpoint, tokens.sampled) for dtype, error in errors.items()}
    )
    column = tokens.columns[side]
    absent = missing(column, exact, floors[policy.dtype].at(exact), tokens.sampled, tokens.rows)
    is_counted = tokens.sampled & ~absent
    judge = Judge(column, resolution(column[is_counted], column), tokens.rows, is_counted)
    bench = SideBench(
        side, judge, distribution, policy.dtype, floors, errors, predictions, tokens, setup.weights, context, tell
    )
    fit = fit_parts(bench, settings) if side == "mu" and is_counted.any() else None
    families = [*of_sampling, *_others(settings, bench, special), *families_of_parts(fit)]
    result = search(bench, families) if is_counted.any() else None
    verdict = verdict_of(bench, result, int(absent.sum()), int(tokens.sampled.sum()))
    parts = read_parts(bench, fit)
    if parts is not None and verdict.code == Code.MIXED_WEIGHTS:
        evidence = [*parts_sentences(parts), *verdict.evidence]
        verdict = verdict.model_copy(update={"evidence": evidence})
    explanation = SideExplanation(
        side=side,
        num_tokens=int(is_counted.sum()),
        num_missing=int(absent.sum()),
        floor_nats=float(np.sqrt(np.mean(bench.floors[policy.dtype].at(exact)[tokens.sampled] ** 2))),
        trials=[] if result is None else [result.null.trial, *(hypothesis.trial for hypothesis in result.attempts)],
        left_out=_left_out(settings, bench, special),
        explained_by=None if result is None or result.explained_by is None else result.explained_by.trial,
        verdict=verdict,
    )
    return explanation, parts


def _others(settings: ExplainSettings, bench: SideBench, special: SpecialTokens) -> list[Family]:
    """Every family but those of the distribution."""
    predictions = bench.predictions
    model = predictions.declared_model.model
    return [
        *edits(bench.tokens, bench.floors[bench.dtype]),
        *other_formats(bench.dtype),
        *contexts(bench.tokens, special),
        *other_weights(settings, bench.weights),
        *stale_caches(settings, bench.context.prompts),
        *(other_rope(rope_base(model)) if rotary_frequencies(model) else ()),
    ]


def _left_out(settings: ExplainSettings, bench: SideBench, special: SpecialTokens) -> dict[str, str]:
    """Hypotheses that nothing was given for."""
    reasons = {}
    if not settings.weights:
        reasons["other weights"] = "none were given; give those of other steps or adapters"
    if not special.headers:
        reasons["an extra header"] = "none was given, and the checkpoint has no chat template to take one from"
    if special.refusals:
        reasons["a header of the chat template"] = special.refusals[0]
    if special.bos is None and len({sequence.prompt_token_ids[0] for sequence in bench.tokens.sequences}) > 1:
        reasons["BOS twice or missing"] = "the checkpoint names no BOS, and the prompts begin differently"
    if not rotary_frequencies(bench.predictions.declared_model.model):
        reasons["another RoPE base or scaling"] = "the model has no rotary frequencies that could be exchanged"
    return reasons
