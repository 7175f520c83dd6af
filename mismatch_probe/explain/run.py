"""A log explained: floors measured, every hypothesis computed, each side judged."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.config.explain import ExplainSettings, LoggedSide
from mismatch_probe.explain.bench import SideBench
from mismatch_probe.explain.checkpoint import rope_base, special_tokens
from mismatch_probe.explain.contexts import SpecialTokens, contexts
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.edits import edits
from mismatch_probe.explain.families import of_distribution
from mismatch_probe.explain.formats import coarser_formats, floors_of_formats, other_formats
from mismatch_probe.explain.hypotheses import Family
from mismatch_probe.explain.judging import Judge
from mismatch_probe.explain.missing import missing
from mismatch_probe.explain.overall import overall
from mismatch_probe.explain.passes import rotary_frequencies
from mismatch_probe.explain.predictions import Predictions
from mismatch_probe.explain.resolution import resolution
from mismatch_probe.explain.search import search
from mismatch_probe.explain.sentences import verdict_of
from mismatch_probe.explain.setup import Context, Setup
from mismatch_probe.explain.tokens import SIDES, LoggedTokens
from mismatch_probe.explain.weights import checkpoint_alone, declared_weights, other_rope, other_weights, stale_caches
from mismatch_probe.records.explanation import Explanation, SideExplanation
from mismatch_probe.records.logged import LoggedResponse
from mismatch_probe.stats.rounding_floor import Floor

Tell = Callable[[LoggedSide, int, int, str], None]
"""Hears which side is looked at, its number from 1, how many there are, and how far that is."""


@dataclass(frozen=True)
class ExplainJob:
    """What a child process needs; it can be pickled."""

    settings: ExplainSettings
    responses: Sequence[LoggedResponse]


def run_explain(job: ExplainJob) -> Explanation:
    """`explain` for a job; raises as it does."""
    return explain(job.settings, job.responses)


def explain(
    settings: ExplainSettings, responses: Sequence[LoggedResponse], tell: Tell = lambda *progress: None
) -> Explanation:
    """What explains each side of the log; all responses are computed, in this process. `tell` hears how far it is.

    Raises:
        UsageError: the log has nothing to explain, or the checkpoint cannot be used for its ids.
        EngineError: the model cannot be loaded, or not be computed in chunks.
        OutOfMemory: it does not fit.
    """
    tokens = LoggedTokens.of(responses)
    with Predictions.opened(settings, tokens) as predictions:
        return explain_with(predictions, settings, tokens, tell)


def explain_with(
    predictions: Predictions,
    settings: ExplainSettings,
    tokens: LoggedTokens,
    tell: Tell = lambda *progress: None,
) -> Explanation:
    """`explain` by predictions that may have been made for other columns of the same responses; raises as it does."""
    begun = time.monotonic()
    there = [side for side in SIDES if side in tokens.columns]
    sides = [
        _explained(side, settings, predictions, tokens, partial(tell, side, number, len(there)))
        for number, side in enumerate(there, 1)
    ]
    return Explanation(
        tool_version=__version__,
        settings=settings,
        num_responses=tokens.num_responses,
        num_tokens=len(tokens.rows),
        sides=sides,
        verdict=overall(sides, tokens),
        seconds=time.monotonic() - begun,
    )


def _explained(
    side: LoggedSide,
    settings: ExplainSettings,
    predictions: Predictions,
    tokens: LoggedTokens,
    tell: Callable[[str], None],
) -> SideExplanation:
    tell("as declared, and its rounding")
    policy = getattr(settings, side)
    context = Context.as_logged(tokens)
    declared = Distribution.declared(policy, tokens.temperature)
    setup = Setup(declared_weights(settings, tokens.responses, side), None, context)
    of_sampling = list(of_distribution(declared))
    predictions.compute(
        setup,
        [
            declared,
            *(option.distribution for family in of_sampling for option in family.options if option.distribution),
        ],
    )
    exact = predictions.column(setup, declared)
    unmoved = predictions.column(replace(setup, weights=checkpoint_alone(tokens.num_responses)), declared)
    errors = {
        dtype: predictions.rounded(dtype, context, declared) - unmoved
        for dtype in (policy.dtype, *coarser_formats(policy.dtype))
    }
    floors = floors_of_formats(
        {dtype: Floor.measured(error, unmoved, tokens.sampled) for dtype, error in errors.items()}
    )
    column = tokens.columns[side]
    absent = missing(column, exact, floors[policy.dtype].at(exact), tokens.sampled, tokens.rows)
    counted = tokens.sampled & ~absent
    judge = Judge(column, resolution(column[counted], column), tokens.rows, counted)
    bench = SideBench(
        side, judge, declared, policy.dtype, floors, errors, predictions, tokens, setup.weights, context, tell
    )
    known = special_tokens(settings, predictions.declared.model)
    explained = search(bench, [*of_sampling, *_others(settings, bench, known)]) if counted.any() else None
    return SideExplanation(
        side=side,
        num_tokens=int(counted.sum()),
        num_missing=int(absent.sum()),
        floor_nats=float(np.sqrt(np.mean(bench.floors[policy.dtype].at(exact)[tokens.sampled] ** 2))),
        trials=[]
        if explained is None
        else [explained.null.trial, *(hypothesis.trial for hypothesis in explained.tried)],
        left_out=_left_out(settings, bench, known),
        explained_by=None if explained is None or explained.explained_by is None else explained.explained_by.trial,
        verdict=verdict_of(bench, explained, int(absent.sum()), int(tokens.sampled.sum())),
    )


def _others(settings: ExplainSettings, bench: SideBench, known: SpecialTokens) -> list[Family]:
    """Every family but those of the distribution."""
    predictions = bench.predictions
    model = predictions.declared.model
    return [
        *edits(bench.tokens, bench.floors[bench.dtype]),
        *other_formats(bench.dtype),
        *contexts(bench.tokens, known),
        *other_weights(settings, bench.weights),
        *stale_caches(settings, bench.context.prompts),
        *(other_rope(rope_base(model)) if rotary_frequencies(model) else ()),
    ]


def _left_out(settings: ExplainSettings, bench: SideBench, known: SpecialTokens) -> dict[str, str]:
    """Hypotheses that nothing was given for."""
    said = {}
    if not settings.weights:
        said["other weights"] = "none were given; give those of other steps or adapters"
    if not known.headers:
        said["an extra header"] = "none was given, and the checkpoint has no chat template to take one from"
    if known.refused:
        said["a header of the chat template"] = known.refused[0]
    if known.bos is None and len({sequence.prompt_token_ids[0] for sequence in bench.tokens.sequences}) > 1:
        said["BOS twice or missing"] = "the checkpoint names no BOS, and the prompts begin differently"
    if not rotary_frequencies(bench.predictions.declared.model):
        said["another RoPE base or scaling"] = "the model has no rotary frequencies that could be exchanged"
    return said
