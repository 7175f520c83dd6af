"""A side of the log with what it takes to try a hypothesis on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mismatch_probe.config.explain import LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.fitting import Fitted, choose_for_log, choose_for_responses, fit_temperature
from mismatch_probe.explain.formats import is_rounding
from mismatch_probe.explain.hypotheses import Family, Option
from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.predictions import Predictions
from mismatch_probe.explain.setup import Context, Setup, WeightsPlan
from mismatch_probe.explain.tokens import Floats, LoggedTokens
from mismatch_probe.notation import write_number
from mismatch_probe.records.explanation import Departure, Trial
from mismatch_probe.stats.rounding_floor import Floor


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
    """dtype: the declared one. floors: of each format. errors [T]: the training path's, of those it was computed in.

    tell: hears how far the side is.
    """

    side: LoggedSide
    judge: Judge
    declared: Distribution
    dtype: Dtype
    floors: dict[Dtype, Floor]
    errors: dict[Dtype, Floats]
    predictions: Predictions
    tokens: LoggedTokens
    weights: WeightsPlan
    context: Context
    tell: Callable[[str], None]

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
        return self.floors[next((family.dtype for family in combination if family.dtype), self.dtype)]

    def is_rounding(self, tried: Tried) -> bool:
        """Whether what a hypothesis with a format leaves is rounding of that format; True of one without."""
        asked = [option.dtype for family in tried.families for option in family.options if option.dtype]
        if not asked:
            return True
        errors = self.errors[asked[0]] if asked[0].round_off > self.dtype.round_off else None
        return is_rounding(self.judge, tried.account, self.tokens, asked[0], errors)

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
