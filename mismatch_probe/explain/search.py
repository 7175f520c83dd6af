"""Which hypothesis explains a side: each is tried, and the simplest that reaches the floor wins."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution, Fitted, choose_for_log, choose_for_responses, fit_temperature
from mismatch_probe.explain.hypotheses import Context, Family, Option, Setup, WeightsPlan, checkpoint_alone
from mismatch_probe.explain.judging import Account, Floats, Judge, LoggedTokens
from mismatch_probe.explain.predictions import LEAST_TIMES, Predictions, is_rounding
from mismatch_probe.notation import write_number
from mismatch_probe.records.findings import Departure, Trial
from mismatch_probe.stats.rounding import Floor


@dataclass(frozen=True)
class Tried:
    """A hypothesis as the record has it, what it says of each token, its families, and what was chosen of each."""

    trial: Trial
    account: Account
    families: tuple[Family, ...]
    options: tuple[Option, ...]

    @property
    def num_fitted(self) -> int:
        return sum(family.num_fitted for family in self.families)


@dataclass(frozen=True)
class SideBench:
    side: LoggedSide
    judge: Judge
    declared: Distribution
    dtype: Dtype
    """The declared format."""
    floors: dict[Dtype, Floor]
    """The rounding floor of each format."""
    errors: dict[Dtype, Floats]
    """The training path's, of those it was computed in [T]."""
    predictions: Predictions
    tokens: LoggedTokens
    weights: WeightsPlan
    context: Context
    tell: Callable[[str], None]
    """The progress callback: how far the side is."""
    floors_of_contexts: dict[str, Floor] = field(default_factory=dict)
    """The declared format's rounding floor in each context, by its name, that it was measured in besides the log's."""

    def null(self) -> Tried:
        """As declared."""
        return self._tried((), (), self._account(()), [], None)

    def tried(self, families: Sequence[Family], null: Tried) -> Tried:
        """A hypothesis of one family, or of several that change different things."""
        fitted, combinations = self._fitted(families)
        chosen = _chosen(families, combinations, fitted)
        departures = _departures(families, chosen, fitted)
        return self._tried(tuple(families), chosen, fitted.account, departures, null)

    def _fitted(self, families: Sequence[Family]) -> tuple[Fitted, list[tuple[Option, ...]]]:
        combinations = list(product(*(family.options for family in families)))
        tokens = self.tokens
        if any(family.free_temperature for family in families):
            (combination,) = combinations
            curve = self.predictions.curve(self._setup(combination))
            declared = self.declared.temperatures(tokens.temperature)
            return fit_temperature(curve, declared, self._floor(combination), self.judge, tokens), combinations
        accounts = [self._account(combination) for combination in combinations]
        if any(family.chosen_for == "response" for family in families):
            return choose_for_responses([self._account(()), *accounts], self.judge, tokens), combinations
        return choose_for_log(accounts, self.judge, tokens), combinations

    def _account(self, combination: tuple[Option, ...]) -> Account:
        distribution = next((family.distribution for family in combination if family.distribution), self.declared)
        predicted = self.predictions.column(self._setup(combination), distribution)
        temperatures = [side.temperatures(self.tokens.temperature) for side in (self.declared, distribution)]
        for family in combination:
            if family.edit is not None:
                predicted = family.edit(predicted, self.judge)
        return self.judge.account(
            predicted, self._floor(combination), float(np.median(temperatures[0] / temperatures[1]))
        )

    def _setup(self, combination: tuple[Option, ...]) -> Setup:
        return Setup(
            next((family.weights for family in combination if family.weights), self.weights),
            next((family.rope for family in combination if family.rope), None),
            next((family.context for family in combination if family.context), self.context),
        )

    def _floor(self, combination: tuple[Option, ...]) -> Floor:
        dtype = next((option.dtype for option in combination if option.dtype), self.dtype)
        context = next((option.context for option in combination if option.context), self.context)
        own = self.floors_of_contexts.get(context.name)
        return self.floors[dtype] if own is None or dtype != self.dtype else own

    def in_own_rounding(self, tried: Tried, null: Tried) -> Tried:
        """The hypothesis by the floor that is measured in its context: without its first token a model may round
        several times as far.
        """
        context = next(option.context for option in tried.options if option.context)
        setup = Setup(checkpoint_alone(self.tokens.num_responses), None, context)
        exact = self.predictions.column(setup, self.declared)
        errors = self.predictions.rounded(self.dtype, context, self.declared) - exact
        self.floors_of_contexts[context.name] = Floor.measure(errors, exact, self.tokens.sampled)
        return self.tried(tried.families, null)

    def is_rounding(self, tried: Tried) -> bool:
        """Whether what a hypothesis with a format leaves is rounding of that format; True of one without."""
        dtypes = [option.dtype for family in tried.families for option in family.options if option.dtype]
        if not dtypes:
            return True
        errors = self.errors[dtypes[0]] if dtypes[0].round_off > self.dtype.round_off else None
        return is_rounding(self.judge, tried.account, self.tokens, dtypes[0], errors)

    def _tried(
        self,
        families: tuple[Family, ...],
        options: tuple[Option, ...],
        account: Account,
        departures: list[Departure],
        null: Tried | None,
    ) -> Tried:
        before = account if null is None else null.account
        trial = Trial(
            departures=departures,
            explained=self.judge.explained(account, before),
            residual_floors=self.judge.floors(account),
            residual_nats=self.judge.nats(account),
            standard_scores=self.judge.standard_scores(account, before),
        )
        return Tried(trial, account, families, options)


def _chosen(
    families: Sequence[Family], combinations: Sequence[tuple[Option, ...]], fitted: Fitted
) -> tuple[Option, ...]:
    """The combination that all tokens together chose, or that most responses did that chose any."""
    if any(family.free_temperature for family in families):
        return combinations[0]
    if any(family.chosen_for == "response" for family in families):
        changed = fitted.choices[fitted.choices > 0].astype(np.int64)
        return combinations[int(np.bincount(changed).argmax()) - 1 if len(changed) else 0]
    return combinations[int(fitted.choices[0])]


def _departures(families: Sequence[Family], chosen: Sequence[Option], fitted: Fitted) -> list[Departure]:
    """What was chosen, with the fitted temperature, or the number of responses that it was chosen for."""
    departures = []
    for family, option in zip(families, chosen, strict=True):
        departure = option.departure
        if family.free_temperature:
            value = float(fitted.choices[0])
            departure = departure.model_copy(update={"what": f"temperature {write_number(value)}", "value": value})
        elif family.chosen_for == "response" and (fitted.choices > 0).any():
            count = int((fitted.choices > 0).sum())
            share = f"{count} of {len(fitted.choices)} responses"
            departure = departure.model_copy(update={"what": f"{departure.what} in {share}", "value": float(count)})
        departures.append(departure)
    return departures


REACHES_FLOORS: Final = 2.0
"""Residuals of so many times the floor or less are explained: an engine rounds otherwise than the training path."""
LEAST_SCORES: Final = 4.0
LEAST_EXPLAINED: Final = 0.1
LEAST_SCORES_UNFITTED: Final = 2.5
LEAST_EXPLAINED_UNFITTED: Final = 0.25
"""Where no parameter was fitted and much is explained, a few responses may decide, as experts that are taken otherwise
do."""
_MOST_SCORES_BACK: Final = 3.0
_MOST_SHARE_BACK: Final = 0.5
"""Of the scores that point to other weights: the side is twice as near to them as to the declared ones."""
_BETTER_SCORES: Final = 3.0
_LEADING: Final = 2


@dataclass(frozen=True)
class Found:
    """As declared, every hypothesis that was tried, best first, and the accepted one; None where nothing explains."""

    null: Tried
    tried: list[Tried]
    explained_by: Tried | None


def search(bench: SideBench, families: Iterable[Family]) -> Found:
    """Try every family alone; where none reaches the floor, try the best of them in twos."""
    null = bench.null()
    singles = _all_tried(bench, [(family,) for family in families], null, "hypothesis")
    best = _simplest(bench, [tried for tried in singles if _is_accepted(bench, tried, null)])
    if best is None and not reaches(null):
        singles = _by_floors_of_contexts(bench, singles, null)
        best = _simplest(bench, [tried for tried in singles if _is_accepted(bench, tried, null)])
    pairs: list[Tried] = []
    if best is None and not reaches(null):
        pairs = _pairs(bench, singles, null)
        best = _simplest(bench, [tried for tried in pairs if _is_accepted(bench, tried, null)])
    if best is None and reaches(null):
        best = null
    ranked = sorted([*singles, *pairs], key=lambda tried: -tried.trial.standard_scores)
    return Found(null, sorted(ranked, key=lambda tried: tried is not best), best)


def _all_tried(bench: SideBench, hypotheses: Sequence[tuple[Family, ...]], null: Tried, called: str) -> list[Tried]:
    """Those that say something else than the declared settings."""
    all_tried = []
    for number, families in enumerate(hypotheses, 1):
        bench.tell(f"{called} {number} of {len(hypotheses)}")
        all_tried.append(bench.tried(families, null))
    return [tried for tried in all_tried if not bench.judge.same(tried.account, null.account)]


def _by_floors_of_contexts(bench: SideBench, singles: Sequence[Tried], null: Tried) -> list[Tried]:
    """The hypotheses, of which those that explain most by another context are judged by the rounding in it."""
    in_context = [tried for tried in singles if any(_is_computed_at_once(option) for option in tried.options)]
    leading = {tried.families[0].name for tried in _leading(in_context)}
    return [bench.in_own_rounding(tried, null) if tried.families[0].name in leading else tried for tried in singles]


def _is_computed_at_once(option: Option) -> bool:
    """Whether it is another context, and not one behind a cache that other weights left."""
    return option.context is not None and option.context.cache is None


def _leading(singles: Sequence[Tried]) -> list[Tried]:
    """The best ones, of those that are better than the declared settings beyond doubt."""
    shown = [tried for tried in singles if tried.trial.standard_scores >= LEAST_SCORES]
    return sorted(shown, key=lambda tried: -tried.trial.standard_scores)[:_LEADING]


def reaches(tried: Tried) -> bool:
    return tried.trial.residual_floors <= REACHES_FLOORS


def _is_accepted(bench: SideBench, tried: Tried, null: Tried) -> bool:
    """Whether it reaches the floor and says more of the side than its declared settings do."""
    if not reaches(tried) or not bench.is_rounding(tried):
        return False
    scores, explained = tried.trial.standard_scores, tried.trial.explained
    if all(family.part == "format" for family in tried.families):
        return scores >= LEAST_SCORES and not LEAST_TIMES <= null.trial.residual_floors <= REACHES_FLOORS
    unfitted = tried.num_fitted == 0 and scores >= LEAST_SCORES_UNFITTED and explained >= LEAST_EXPLAINED_UNFITTED
    return (
        unfitted
        or (scores >= LEAST_SCORES and explained >= LEAST_EXPLAINED)
        or (_names_weights(tried) and scores > 0 and is_drawn_to(bench.judge, tried.account, null.account))
    )


def _names_weights(tried: Tried) -> bool:
    """Whether it is other weights that somebody gave, of which the log chooses nothing."""
    return tried.num_fitted == 0 and all(
        option.departure.code == Code.STALE_WEIGHTS and option.weights for option in tried.options
    )


def is_drawn_to(judge: Judge, account: Account, null: Account) -> bool:
    """Whether the tokens point from the null to the account beyond doubt, and from the account hardly back.

    Both grow with the square root of the log's length where a side lies between them, as one does that rounds: in BF16
    a quarter of the way back was seen. So what points back must be little beside what points there.
    """
    scores = judge.drawn_to(account, null)
    most_back = max(_MOST_SCORES_BACK, _MOST_SHARE_BACK * scores)
    return scores >= LEAST_SCORES and judge.drawn_to(null, account) <= most_back


def _simplest(bench: SideBench, tried: Sequence[Tried]) -> Tried | None:
    """The simplest one, unless one that fits more parameters is better beyond doubt."""
    ordered = sorted(
        tried, key=lambda candidate: (len(candidate.families), candidate.num_fitted, -candidate.trial.standard_scores)
    )
    best: Tried | None = None
    for candidate in ordered:
        if best is None or bench.judge.standard_scores(candidate.account, best.account) >= _BETTER_SCORES:
            best = candidate
    return best


def _pairs(bench: SideBench, singles: Sequence[Tried], null: Tried) -> list[Tried]:
    """The best alone with everything that changes another part.

    A temperature stays at first what it was alone; with the best partners it is fitted again.
    """
    leading = _leading(singles)
    hypotheses = {
        frozenset((tried.families[0].name, other.families[0].name)): (_as_alone(tried), _as_alone(other))
        for tried in leading
        for other in singles
        if tried.families[0].part != other.families[0].part
    }
    together = _all_tried(bench, list(hypotheses.values()), null, "two hypotheses together,")
    ranked = sorted(together, key=lambda tried: -tried.trial.standard_scores)
    again = [_with_free_temperature(tried) for tried in ranked[:_LEADING]]
    return [*ranked, *_all_tried(bench, [tried for tried in again if tried], null, "the best two fitted again,")]


def _as_alone(tried: Tried) -> Family:
    """A family whose temperature, if it has one, is what was fitted; of what takes a pass each, what was chosen."""
    (family,), (option,), (departure,) = tried.families, tried.options, tried.trial.departures
    if not family.free_temperature:
        return family if family.part == "distribution" else replace(family, options=(option,))
    fixed = replace(option, departure=departure, distribution=Distribution(temperature=departure.value))
    return Family(family.name, family.part, (fixed,))


def _with_free_temperature(tried: Tried) -> tuple[Family, ...]:
    """The same families with the temperature free and the rest as it was chosen; none where that cannot be fitted."""
    fixed = [option.departure.code == Code.TEMPERATURE for option in tried.options]
    if not any(fixed) or any(family.chosen_for == "response" for family in tried.families):
        return ()
    return tuple(
        replace(family, options=(replace(option, distribution=None),), free_temperature=True)
        if is_temperature
        else replace(family, options=(option,))
        for family, option, is_temperature in zip(tried.families, tried.options, fixed, strict=True)
    )
