"""A log explained: floors measured, every hypothesis computed, each side judged."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.config.explain import ExplainSettings, LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.bench import SideBench
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.families import of_distribution
from mismatch_probe.explain.floor import Floor, resolution
from mismatch_probe.explain.judging import Judge
from mismatch_probe.explain.passes import weights_in
from mismatch_probe.explain.predictions import Predictions, Setup
from mismatch_probe.explain.search import search
from mismatch_probe.explain.sentences import verdict_of
from mismatch_probe.explain.setup import Context
from mismatch_probe.explain.tokens import SIDES, Floats, LoggedTokens
from mismatch_probe.records.explanation import Explanation, SideExplanation
from mismatch_probe.records.logged import LoggedResponse
from mismatch_probe.records.summary import Verdict

_GRAVEST_FIRST = ("broken", "bug", "undecided", "precision", "clean")


def explain(settings: ExplainSettings, responses: Sequence[LoggedResponse]) -> Explanation:
    """What explains each side of the log; all responses are computed, in this process.

    Raises:
        UsageError: the log has nothing to explain, or the checkpoint cannot be used for its ids.
        EngineError: the model cannot be loaded, or not be computed in chunks.
        OutOfMemory: it does not fit.
    """
    begun = time.monotonic()
    tokens = LoggedTokens.of(responses)
    context = Context.as_logged(tokens)
    in_formats = _in_formats(settings, tokens, context)
    with Predictions.opened(settings, tokens) as predictions:
        sides = [
            _explained(side, settings, predictions, context, in_formats) for side in SIDES if side in tokens.columns
        ]
    return Explanation(
        tool_version=__version__,
        settings=settings,
        num_responses=tokens.num_responses,
        num_tokens=len(tokens.rows),
        sides=sides,
        verdict=_overall(sides),
        seconds=time.monotonic() - begun,
    )


@dataclass(frozen=True)
class ExplainJob:
    """What a child process needs; it can be pickled."""

    settings: ExplainSettings
    responses: Sequence[LoggedResponse]


def run_explain(job: ExplainJob) -> Explanation:
    """`explain` for a job; raises as it does."""
    return explain(job.settings, job.responses)


def _explained(
    side: LoggedSide,
    settings: ExplainSettings,
    predictions: Predictions,
    context: Context,
    in_formats: dict[tuple[Dtype, Distribution], Floats],
) -> SideExplanation:
    policy = getattr(settings, side)
    declared = Distribution.declared(policy)
    families = list(of_distribution(declared))
    setup = Setup(None, None, context)
    distributions = [one.distribution for family in families for one in family.options if one.distribution]
    predictions.compute(setup, [declared, *distributions])
    exact = predictions.column(setup, declared)
    column = predictions.tokens.columns[side]
    counted = predictions.tokens.sampled & np.isfinite(column)
    judge = Judge(column, resolution(column), predictions.tokens.rows, counted)
    floors = {
        dtype: Floor.measured(found - exact, exact, counted)
        for (dtype, distribution), found in in_formats.items()
        if distribution == declared
    }
    bench = SideBench(side, judge, declared, policy.dtype, floors, predictions, context)
    found = search(bench, families)
    return SideExplanation(
        side=side,
        num_tokens=int(counted.sum()),
        num_missing=int((predictions.tokens.sampled & ~counted).sum()),
        floor_nats=float(np.sqrt(np.mean(found.null.account.unit[counted] ** 2))),
        trials=[found.null.trial, *(one.trial for one in found.tried)],
        explained_by=None if found.explained_by is None else found.explained_by.trial,
        verdict=verdict_of(bench, found),
    )


def _in_formats(
    settings: ExplainSettings, tokens: LoggedTokens, context: Context
) -> dict[tuple[Dtype, Distribution], Floats]:
    """The log's tokens as a training path computes them in each declared format."""
    found: dict[tuple[Dtype, Distribution], Floats] = {}
    for dtype in dict.fromkeys((settings.mu.dtype, settings.pi.dtype)):
        declared = list(dict.fromkeys(Distribution.declared(one) for one in (settings.mu, settings.pi)))
        with weights_in(settings, tokens, dtype) as loaded:
            columns = loaded.columns(context, None, declared)
        found |= {(dtype, one): column for one, column in zip(declared, columns, strict=True)}
    return found


def _overall(sides: Sequence[SideExplanation]) -> Verdict:
    return min((side.verdict for side in sides), key=lambda verdict: _GRAVEST_FIRST.index(verdict.kind))
