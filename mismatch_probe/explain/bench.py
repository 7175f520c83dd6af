"""A side of the log with what it takes to try a hypothesis on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mismatch_probe.config.explain import LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.fitting import Fitted, choose_for_log, choose_for_responses, fit_temperature
from mismatch_probe.explain.floor import Floor
from mismatch_probe.explain.hypotheses import Family, Option
from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.predictions import Predictions, Setup
from mismatch_probe.explain.setup import Context
from mismatch_probe.notation import write_number
from mismatch_probe.records.explanation import Departure, Trial


@dataclass(frozen=True)
class Tried:
    """A hypothesis as the record has it, what it says of each token, and of how many families and parameters it is."""

    trial: Trial
    account: Account
    families: tuple[Family, ...]

    @property
    def num_fitted(self) -> int:
        return sum(family.num_fitted for family in self.families)


@dataclass(frozen=True)
class SideBench:
    """floors: of each format that was measured; `dtype` is the declared one."""

    side: LoggedSide
    judge: Judge
    declared: Distribution
    dtype: Dtype
    floors: dict[Dtype, Floor]
    predictions: Predictions
    context: Context

    def null(self) -> Tried:
        """As declared."""
        return self._tried((), self._account(()), [], None)

    def tried(self, families: Sequence[Family], null: Tried) -> Tried:
        """A hypothesis of one family, or of several that change different things."""
        fitted, combinations = self._fitted(families)
        departures = _departures(families, combinations, fitted)
        return self._tried(tuple(families), fitted.account, departures, null)

    def _fitted(self, families: Sequence[Family]) -> tuple[Fitted, list[tuple[Option, ...]]]:
        combinations = list(product(*(family.options for family in families)))
        tokens = self.predictions.tokens
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
        distribution = next((one.distribution for one in combination if one.distribution), self.declared)
        predicted = self.predictions.column(self._setup(combination), distribution)
        temperatures = [one.temperatures(self.predictions.tokens.temperature) for one in (self.declared, distribution)]
        for one in combination:
            if one.edit is not None:
                predicted = one.edit(predicted, self.judge)
        return self.judge.account(
            predicted, self._floor(combination), float(np.median(temperatures[0] / temperatures[1]))
        )

    def _setup(self, combination: tuple[Option, ...]) -> Setup:
        return Setup(
            next((one.weights for one in combination if one.weights), None),
            next((one.rope for one in combination if one.rope), None),
            next((one.context for one in combination if one.context), self.context),
        )

    def _floor(self, combination: tuple[Option, ...]) -> Floor:
        return self.floors[next((one.dtype for one in combination if one.dtype), self.dtype)]

    def _tried(
        self, families: tuple[Family, ...], account: Account, departures: list[Departure], null: Tried | None
    ) -> Tried:
        before = account if null is None else null.account
        trial = Trial(
            departures=departures,
            explained=self.judge.explained(account, before),
            residual_floors=self.judge.floors(account),
            residual_nats=self.judge.nats(account),
            standard_scores=self.judge.standard_scores(account, before),
        )
        return Tried(trial, account, families)


def _departures(
    families: Sequence[Family], combinations: Sequence[tuple[Option, ...]], fitted: Fitted
) -> list[Departure]:
    """Those of the combination that was chosen, with the fitted temperature and the share of the responses."""
    free = [family for family in families if family.free_temperature]
    if free:
        temperature = float(fitted.choices[0])
        return [
            one.departure.model_copy(update={"what": f"temperature {write_number(temperature)}", "value": temperature})
            if family.free_temperature
            else one.departure
            for family, one in zip(families, combinations[0], strict=True)
        ]
    if any(family.chosen_for == "response" for family in families):
        changed = fitted.choices[fitted.choices > 0]
        if not len(changed):
            return [one.departure for one in combinations[0]]
        most = int(np.bincount(changed.astype(np.int64)).argmax())
        share = f"{len(changed)} of {len(fitted.choices)} responses"
        return [
            one.departure.model_copy(update={"what": f"{one.departure.what} in {share}", "value": float(len(changed))})
            if family.chosen_for == "response"
            else one.departure
            for family, one in zip(families, combinations[most - 1], strict=True)
        ]
    return [one.departure for one in combinations[int(fitted.choices[0])]]
