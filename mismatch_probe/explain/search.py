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
class Attempt:
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
    as_declared: Distribution
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
    tell: Callable[[str, float | None], None]
    """The progress callback: how far the side is, and the seconds that what it does will take yet, where known."""
    floors_of_contexts: dict[str, Floor] = field(default_factory=dict)
    """The declared format's rounding floor in each context, by its name, that it was measured in besides the log's."""

    def null(self) -> Attempt:
        """As declared."""
        return self._make_attempt((), (), self._account(()), [], None)

    def attempt(self, families: Sequence[Family], null: Attempt) -> Attempt:
        """A hypothesis of one family, or of several that change different things."""
        fit, combinations = self._fit(families)
        options = _choose(families, combinations, fit)
        departures = _fitted_departures(families, options, fit)
        return self._make_attempt(tuple(families), options, fit.account, departures, null)

    def setups(self, families: Sequence[Family]) -> list[Setup]:
        """Of each combination of the families' options."""
        return [self._setup(combination) for combination in product(*(family.options for family in families))]

    def _fit(self, families: Sequence[Family]) -> tuple[Fitted, list[tuple[Option, ...]]]:
        combinations = list(product(*(family.options for family in families)))
        tokens = self.tokens
        if any(family.free_temperature for family in families):
            (combination,) = combinations
            curve = self.predictions.curve(self._setup(combination))
            temperatures = self.as_declared.temperatures(tokens.temperature)
            return fit_temperature(curve, temperatures, self._floor(combination), self.judge, tokens), combinations
        accounts = [self._account(combination) for combination in combinations]
        if any(family.chosen_for == "response" for family in families):
            return choose_for_responses([self._account(()), *accounts], self.judge, tokens), combinations
        return choose_for_log(accounts, self.judge, tokens), combinations

    def _account(self, combination: tuple[Option, ...]) -> Account:
        distribution = next((family.distribution for family in combination if family.distribution), self.as_declared)
        prediction = self.predictions.column(self._setup(combination), distribution)
        temperatures = [side.temperatures(self.tokens.temperature) for side in (self.as_declared, distribution)]
        for family in combination:
            if family.edit is not None:
                prediction = family.edit(prediction, self.judge)
        return self.judge.account(
            prediction, self._floor(combination), float(np.median(temperatures[0] / temperatures[1]))
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

    def in_own_rounding(self, attempt: Attempt, null: Attempt) -> Attempt:
        """The hypothesis by the floor that is measured in its context: without its first token a model may round
        several times as far.
        """
        context = next(option.context for option in attempt.options if option.context)
        setup = Setup(checkpoint_alone(self.tokens.num_responses), None, context)
        exact = self.predictions.column(setup, self.as_declared)
        errors = self.predictions.in_format(self.dtype, context, self.as_declared) - exact
        self.floors_of_contexts[context.name] = Floor.measure(errors, exact, self.tokens.sampled)
        return self.attempt(attempt.families, null)

    def is_rounding(self, attempt: Attempt) -> bool:
        """Whether what a hypothesis with a format leaves is rounding of that format; True of one without."""
        dtypes = [option.dtype for family in attempt.families for option in family.options if option.dtype]
        if not dtypes:
            return True
        errors = self.errors[dtypes[0]] if dtypes[0].round_off > self.dtype.round_off else None
        return is_rounding(self.judge, attempt.account, self.tokens, dtypes[0], errors)

    def _make_attempt(
        self,
        families: tuple[Family, ...],
        options: tuple[Option, ...],
        account: Account,
        departures: list[Departure],
        null: Attempt | None,
    ) -> Attempt:
        baseline = account if null is None else null.account
        trial = Trial(
            departures=departures,
            explained=self.judge.explained_share(account, baseline),
            residual_floors=self.judge.floors(account),
            residual_nats=self.judge.nats(account),
            standard_scores=self.judge.standard_scores(account, baseline),
        )
        return Attempt(trial, account, families, options)


def _choose(families: Sequence[Family], combinations: Sequence[tuple[Option, ...]], fit: Fitted) -> tuple[Option, ...]:
    """The combination that all tokens together chose, or that most responses did that chose any."""
    if any(family.free_temperature for family in families):
        return combinations[0]
    if any(family.chosen_for == "response" for family in families):
        numbers = fit.choices[fit.choices > 0].astype(np.int64)
        return combinations[int(np.bincount(numbers).argmax()) - 1 if len(numbers) else 0]
    return combinations[int(fit.choices[0])]


def _fitted_departures(families: Sequence[Family], options: Sequence[Option], fit: Fitted) -> list[Departure]:
    """What was chosen, with the fitted temperature, or the number of responses that it was chosen for."""
    departures = []
    for family, option in zip(families, options, strict=True):
        departure = option.departure
        if family.free_temperature:
            value = float(fit.choices[0])
            departure = departure.model_copy(update={"what": f"temperature {write_number(value)}", "value": value})
        elif family.chosen_for == "response" and (fit.choices > 0).any():
            count = int((fit.choices > 0).sum())
            share = f"{count} of {len(fit.choices)} responses"
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
class SearchResult:
    """As declared, every hypothesis that was tried, best first, and the accepted one; None where nothing explains."""

    null: Attempt
    attempts: list[Attempt]
    explained_by: Attempt | None


def search(bench: SideBench, families: Iterable[Family]) -> SearchResult:
    """Try every family alone; where none reaches the floor, try the best of them in twos."""
    null = bench.null()
    singles = _attempts_of(bench, [(family,) for family in families], null, "hypothesis")
    best = _simplest(bench, [attempt for attempt in singles if _is_accepted(bench, attempt, null)])
    if best is None and not reaches(null):
        singles = _by_floors_of_contexts(bench, singles, null)
        best = _simplest(bench, [attempt for attempt in singles if _is_accepted(bench, attempt, null)])
    pairs: list[Attempt] = []
    if best is None and not reaches(null):
        pairs = _pairs(bench, singles, null)
        best = _simplest(bench, [attempt for attempt in pairs if _is_accepted(bench, attempt, null)])
    if best is None and reaches(null):
        best = null
    by_scores = sorted([*singles, *pairs], key=lambda attempt: -attempt.trial.standard_scores)
    return SearchResult(null, sorted(by_scores, key=lambda attempt: attempt is not best), best)


def _attempts_of(bench: SideBench, hypotheses: Sequence[tuple[Family, ...]], null: Attempt, what: str) -> list[Attempt]:
    """Those that say something else than the declared settings."""
    attempts, predictions = [], bench.predictions
    tokens = predictions.tokens_to_pass([bench.setups(families) for families in hypotheses])
    for number, families in enumerate(hypotheses):
        seconds_left = predictions.clock.seconds(sum(tokens[number:]))
        bench.tell(f"{what} {number + 1} of {len(hypotheses)}", seconds_left)
        with predictions.clock.measure(tokens[number]):
            attempts.append(bench.attempt(families, null))
    return [attempt for attempt in attempts if not bench.judge.same(attempt.account, null.account)]


def _by_floors_of_contexts(bench: SideBench, singles: Sequence[Attempt], null: Attempt) -> list[Attempt]:
    """The hypotheses, of which those that explain most by another context are judged by the rounding in it."""
    in_context = [attempt for attempt in singles if any(_is_computed_at_once(option) for option in attempt.options)]
    leading = {attempt.families[0].name for attempt in _leading(in_context)}
    return [
        bench.in_own_rounding(attempt, null) if attempt.families[0].name in leading else attempt for attempt in singles
    ]


def _is_computed_at_once(option: Option) -> bool:
    """Whether it is another context, and not one behind a cache that other weights left."""
    return option.context is not None and option.context.cache is None


def _leading(singles: Sequence[Attempt]) -> list[Attempt]:
    """The best ones, of those that are better than the declared settings beyond doubt."""
    clear_attempts = [attempt for attempt in singles if attempt.trial.standard_scores >= LEAST_SCORES]
    return sorted(clear_attempts, key=lambda attempt: -attempt.trial.standard_scores)[:_LEADING]


def reaches(attempt: Attempt) -> bool:
    return attempt.trial.residual_floors <= REACHES_FLOORS


def _is_accepted(bench: SideBench, attempt: Attempt, null: Attempt) -> bool:
    """Whether it reaches the floor and says more of the side than its declared settings do."""
    if not reaches(attempt) or not bench.is_rounding(attempt):
        return False
    scores, explained_share = attempt.trial.standard_scores, attempt.trial.explained
    if all(family.part == "format" for family in attempt.families):
        return scores >= LEAST_SCORES and not LEAST_TIMES <= null.trial.residual_floors <= REACHES_FLOORS
    is_unfitted = (
        attempt.num_fitted == 0 and scores >= LEAST_SCORES_UNFITTED and explained_share >= LEAST_EXPLAINED_UNFITTED
    )
    return (
        is_unfitted
        or (scores >= LEAST_SCORES and explained_share >= LEAST_EXPLAINED)
        or (_names_weights(attempt) and scores > 0 and is_drawn_to(bench.judge, attempt.account, null.account))
    )


def _names_weights(attempt: Attempt) -> bool:
    """Whether it is other weights that somebody gave, of which the log chooses nothing."""
    return attempt.num_fitted == 0 and all(
        option.departure.code == Code.STALE_WEIGHTS and option.weights for option in attempt.options
    )


def is_drawn_to(judge: Judge, account: Account, null: Account) -> bool:
    """Whether the tokens point from the null to the account beyond doubt, and from the account hardly back.

    Both grow with the square root of the log's length where a side lies between them, as one does that rounds: in BF16
    a quarter of the way back was seen. So what points back must be little beside what points there.
    """
    scores = judge.drawn_to(account, null)
    most_back = max(_MOST_SCORES_BACK, _MOST_SHARE_BACK * scores)
    return scores >= LEAST_SCORES and judge.drawn_to(null, account) <= most_back


def _simplest(bench: SideBench, attempts: Sequence[Attempt]) -> Attempt | None:
    """The simplest one, unless one that fits more parameters is better beyond doubt."""
    by_simplicity = sorted(
        attempts,
        key=lambda candidate: (len(candidate.families), candidate.num_fitted, -candidate.trial.standard_scores),
    )
    best: Attempt | None = None
    for candidate in by_simplicity:
        if best is None or bench.judge.standard_scores(candidate.account, best.account) >= _BETTER_SCORES:
            best = candidate
    return best


def _pairs(bench: SideBench, singles: Sequence[Attempt], null: Attempt) -> list[Attempt]:
    """The best alone with everything that changes another part.

    A temperature stays at first what it was alone; with the best partners it is fitted again.
    """
    leading = _leading(singles)
    hypotheses = {
        frozenset((attempt.families[0].name, other.families[0].name)): (_as_alone(attempt), _as_alone(other))
        for attempt in leading
        for other in singles
        if attempt.families[0].part != other.families[0].part
    }
    pairs = _attempts_of(bench, list(hypotheses.values()), null, "two hypotheses together,")
    by_scores = sorted(pairs, key=lambda attempt: -attempt.trial.standard_scores)
    refits = [_with_free_temperature(attempt) for attempt in by_scores[:_LEADING]]
    return [
        *by_scores,
        *_attempts_of(bench, [attempt for attempt in refits if attempt], null, "the best two fitted again,"),
    ]


def _as_alone(attempt: Attempt) -> Family:
    """A family whose temperature, if it has one, is what was fitted; of what takes a pass each, what was chosen."""
    (family,), (option,), (departure,) = attempt.families, attempt.options, attempt.trial.departures
    if not family.free_temperature:
        return family if family.part == "distribution" else replace(family, options=(option,))
    with_value = replace(option, departure=departure, distribution=Distribution(temperature=departure.value))
    return Family(family.name, family.part, (with_value,))


def _with_free_temperature(attempt: Attempt) -> tuple[Family, ...]:
    """The same families with the temperature free and the rest as it was chosen; none where that cannot be fitted."""
    is_fixed = [option.departure.code == Code.TEMPERATURE for option in attempt.options]
    if not any(is_fixed) or any(family.chosen_for == "response" for family in attempt.families):
        return ()
    return tuple(
        replace(family, options=(replace(option, distribution=None),), free_temperature=True)
        if is_temperature
        else replace(family, options=(option,))
        for family, option, is_temperature in zip(attempt.families, attempt.options, is_fixed, strict=True)
    )
