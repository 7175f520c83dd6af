"""The parameter of a hypothesis, fitted on other tokens than those it is judged on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import minimize_scalar

from mismatch_probe.explain.distributions import INVERSE_TEMPERATURES, TemperatureCurve
from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.tokens import Bools, Floats, LoggedTokens
from mismatch_probe.stats.rounding_floor import Floor

_MARGIN: Final = 3.0
"""A likelihood twenty times as large."""


@dataclass(frozen=True)
class Fitted:
    """An account whose parameter each half of the tokens took from the other half.

    choices: the parameter that all tokens together choose, the number of an account or a temperature; for each
    response [R] where each chose its own.
    """

    account: Account
    choices: Floats


def choose_for_log(accounts: Sequence[Account], judge: Judge, tokens: LoggedTokens) -> Fitted:
    """The account with the least loss on one half of the responses stands for the other half."""
    if len(accounts) == 1:
        return Fitted(accounts[0], np.zeros(1))
    losses = [judge.loss(given) for given in accounts]
    halves = tokens.halves
    chosen = np.empty(len(tokens.rows), dtype=np.int64)
    for half in (False, True):
        chosen[halves == half] = _least(losses, halves != half)
    return Fitted(_by_token(accounts, chosen), np.array([float(_least(losses, np.ones_like(halves)))]))


def choose_for_responses(accounts: Sequence[Account], judge: Judge, tokens: LoggedTokens) -> Fitted:
    """The same for every response of its own, its even tokens choosing for its odd ones and the other way round.

    The first account, as declared, is left where another one's loss is less by _MARGIN. An account that says nothing of
    a response means that nothing can be said of it.
    """
    losses = np.stack([np.nan_to_num(judge.loss(given)) for given in accounts])
    spoken = np.stack([np.isfinite(judge.loss(given)) for given in accounts])
    losses = np.where(spoken.all(axis=0), losses, 0.0)
    parity = tokens.places % 2 == 1
    sums = np.stack([[_by_row(of_account * (parity == odd), tokens) for of_account in losses] for odd in (False, True)])
    sums[:, 1:] += _MARGIN
    silent = np.stack([_by_row(says.astype(np.float64), tokens) == 0 for says in spoken]) & _counted(judge, tokens)
    sums[:, silent] = -np.inf
    chosen = np.where(parity, sums[0].argmin(axis=0)[tokens.rows], sums[1].argmin(axis=0)[tokens.rows])
    choices = np.where(silent.any(axis=0), 0, sums.sum(axis=0).argmin(axis=0))
    return Fitted(_by_token(accounts, chosen), choices.astype(np.float64))


def fit_temperature(
    curve: TemperatureCurve, declared: Floats, floor: Floor, judge: Judge, tokens: LoggedTokens
) -> Fitted:
    """The temperature of all responses. What it is divided by shrinks the errors of the logits too.

    declared [T]: each token's declared temperature, at which the floor was measured.
    """

    def account(temperature: float) -> Account:
        return judge.account(curve.at(temperature), floor, float(np.median(declared)) / temperature)

    def fitted(counts: Bools) -> float:
        def loss(log_temperature: float) -> float:
            return float(np.nanmean(judge.loss(account(float(np.exp(log_temperature))))[counts]))

        grid = np.log(1 / INVERSE_TEMPERATURES)
        at_grid = [loss(point) for point in grid]
        best = int(np.argmin(at_grid))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        minimum = minimize_scalar(loss, bounds=(min(around), max(around)), method="bounded", options={"xatol": 1e-5})
        return float(np.exp(minimum.x if minimum.fun < at_grid[best] else grid[best]))

    halves = tokens.halves
    accounts = [account(fitted(halves)), account(fitted(~halves))]
    return Fitted(_by_token(accounts, halves.astype(np.int64)), np.array([fitted(np.ones_like(halves))]))


def _counted(judge: Judge, tokens: LoggedTokens) -> Bools:
    """Responses with a token that counts [R]."""
    return _by_row(judge.counted.astype(np.float64), tokens) > 0


def _least(losses: Sequence[Floats], counts: Bools) -> int:
    sums = [
        float(np.nanmean(of_account[counts])) if np.isfinite(of_account[counts]).any() else np.inf
        for of_account in losses
    ]
    return int(np.argmin(sums))


def _by_token(accounts: Sequence[Account], chosen: np.ndarray) -> Account:
    at = np.arange(len(chosen))
    return Account(
        np.stack([given.predicted for given in accounts])[chosen, at],
        np.stack([given.unit for given in accounts])[chosen, at],
    )


def _by_row(values: Floats, tokens: LoggedTokens) -> Floats:
    return np.asarray(np.bincount(tokens.rows, weights=values, minlength=tokens.num_responses), dtype=np.float64)
