"""Log-probs under many sampling settings at once, and the setting that fits best, judged on other tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize_scalar

from mismatch_probe.config.model import DeclaredPolicy
from mismatch_probe.explain.judging import Account, Bools, Floats, Judge, LoggedTokens
from mismatch_probe.records.sequences import KeptSets
from mismatch_probe.stats.rounding import Floor

_CHUNK_BYTES: Final = 128 * 2**20
_COPIES: Final = 6
"""Arrays as large as the logits that exist at once."""
INVERSE_TEMPERATURES: Final = np.linspace(1 / 4, 4, 76)


@dataclass(frozen=True)
class Distribution:
    """What is done to logits: divided by the temperature, cut by min-p, top-k and top-p in this order, or to the sets
    that the log records, normalised.
    """

    temperature: float | None = None
    """None stands for what the log says of each response, where it says several temperatures; 1 where it says none."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    in_sets: bool = False
    """Cut to the sets that the log records."""

    @classmethod
    def of_policy(cls, policy: DeclaredPolicy, logged_temperature: Floats, *, has_sets: bool = False) -> "Distribution":
        """logged: the temperature that the log says of each token [T], NaN where none. has_sets: the log records what
        each token was drawn from, which counts unless the policy declares a cut.
        """
        temperatures = np.unique(np.where(np.isfinite(logged_temperature), logged_temperature, 1.0))
        temperature = (
            float(temperatures[0]) if policy.temperature is None and len(temperatures) == 1 else policy.temperature
        )
        declared = cls(temperature, policy.top_p, policy.top_k, policy.min_p)
        return replace(declared, in_sets=True) if has_sets and not declared.is_cut else declared

    @property
    def is_cut(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def uncut(self) -> "Distribution":
        return replace(self, top_p=1.0, top_k=0, min_p=0.0, in_sets=False)

    def temperatures(self, logged_temperature: Floats) -> Floats:
        """Of each token [T]."""
        if self.temperature is not None:
            return np.full_like(logged_temperature, self.temperature)
        return np.where(np.isfinite(logged_temperature), logged_temperature, 1.0)


@dataclass(frozen=True)
class TemperatureCurve:
    """Log-probs of tokens [T] at any temperature from 1/4 to 4: their own logits, and the splines of log Z(1/T)."""

    own_logits: Floats
    log_normalisers: CubicSpline

    def at(self, temperature: float) -> Floats:
        logits: Floats = self.own_logits / temperature - self.log_normalisers(1 / temperature)
        return logits


def chunk_of_tokens(vocab_size: int) -> int:
    """How many tokens' logits are held at once."""
    return max(1, _CHUNK_BYTES // (vocab_size * 4 * _COPIES))


def log_probs(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    temperatures_KT: torch.Tensor,
    cuts: Sequence[Distribution],
    sets: KeptSets | None = None,
) -> torch.Tensor:
    """Log-probs of the targets under each of K distributions [K, T]; a target is never cut away itself.

    A token that was sampled was not cut: where rounding moves it over the edge, the edge moves with it.
    """
    columns: list[torch.Tensor] = [torch.empty(0)] * len(cuts)
    for temperature in dict.fromkeys(distribution.temperature for distribution in cuts):
        alike = [number for number, distribution in enumerate(cuts) if distribution.temperature == temperature]
        logprobs_TV = torch.log_softmax(logits_TV / temperatures_KT[alike[0]][:, None], dim=-1)
        own_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        in_order = Ordered.of(logprobs_TV, own_T) if any(cuts[number].is_cut for number in alike) else None
        for number in alike:
            is_cut = in_order is not None and cuts[number].is_cut
            columns[number] = own_T - in_order.log_kept_mass(cuts[number]) if in_order and is_cut else own_T
            if cuts[number].in_sets and sets is not None:
                columns[number] = own_T - _log_mass(logprobs_TV, targets_T, sets)
    return torch.stack(columns)


def _log_mass(logprobs_TV: torch.Tensor, targets_T: torch.Tensor, sets: KeptSets) -> torch.Tensor:
    """Log of the probability that each token's set has [T], with the token itself; 0 where the set is empty."""
    owners_M = np.repeat(np.arange(len(sets.ends)), sets.sizes)
    is_known = sets.ids < logprobs_TV.shape[1]
    device = logprobs_TV.device
    owners_of_ids_M = torch.from_numpy(owners_M[is_known]).to(device)
    ids_M = torch.from_numpy(sets.ids[is_known].astype(np.int64)).to(device)
    own_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1).exp()
    is_own_M = ids_M == targets_T[owners_of_ids_M]
    mass_T = torch.zeros_like(own_T).index_add_(0, owners_of_ids_M, logprobs_TV[owners_of_ids_M, ids_M].exp())
    is_inside_T = torch.zeros_like(own_T).index_add_(0, owners_of_ids_M, is_own_M.to(own_T)) > 0
    mass_T = torch.where(is_inside_T, mass_T, mass_T + own_T)
    has_set_T = torch.from_numpy(sets.sizes > 0).to(device)
    return torch.where(has_set_T, mass_T, 1.0).log()


@dataclass(frozen=True)
class Ordered:
    """Log-probs from the likeliest on [T, V], the probability of all up to each, and the place of the target [T]."""

    logprobs_TV: torch.Tensor
    mass_TV: torch.Tensor
    target_places_T: torch.Tensor

    @classmethod
    def of(cls, logprobs_TV: torch.Tensor, own_T: torch.Tensor) -> "Ordered":
        ordered_TV = logprobs_TV.sort(dim=-1, descending=True).values
        places_T = torch.searchsorted(-ordered_TV, -own_T[:, None], right=True).squeeze(-1) - 1
        return cls(ordered_TV, ordered_TV.exp().cumsum(dim=-1), places_T)

    def log_kept_mass(self, distribution: Distribution) -> torch.Tensor:
        """Log of the probability that the kept tokens have together [T], the target's place always among them."""
        return self.mass_up_to(self.last_kept(distribution).maximum(self.target_places_T)).log()

    def last_kept(self, distribution: Distribution) -> torch.Tensor:
        """The place of the least likely token that is kept [T], whatever the target is."""
        size = self.logprobs_TV.shape[1]
        last_T = torch.full_like(self.target_places_T, min(distribution.top_k or size, size) - 1)
        if distribution.min_p > 0:
            least_T1 = self.logprobs_TV[:, :1] + float(np.log(distribution.min_p))
            last_T = last_T.minimum(torch.searchsorted(-self.logprobs_TV, -least_T1, right=True).squeeze(-1) - 1)
        if distribution.top_p < 1:
            enough_T1 = distribution.top_p * self.mass_up_to(last_T)[:, None]
            last_T = last_T.minimum(torch.searchsorted(self.mass_TV, enough_T1).squeeze(-1))
        return last_T

    def mass_up_to(self, last_T: torch.Tensor) -> torch.Tensor:
        """The probability of all tokens up to these places [T]."""
        return self.mass_TV.gather(-1, last_T[:, None]).squeeze(-1)


def log_normalisers(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exp(logits / T) at each of INVERSE_TEMPERATURES [G, T]."""
    return torch.stack([torch.logsumexp(logits_TV * float(inverse), dim=-1) for inverse in INVERSE_TEMPERATURES])


def curve(own_logits: Floats, normalisers_GT: Floats) -> TemperatureCurve:
    return TemperatureCurve(own_logits, CubicSpline(INVERSE_TEMPERATURES, normalisers_GT, axis=0))


_MARGIN: Final = 3.0
"""A likelihood twenty times as large."""


@dataclass(frozen=True)
class Fitted:
    """An account whose parameter each half of the tokens took from the other half."""

    account: Account
    choices: Floats
    """The parameter that all tokens together choose, the number of an account or a temperature; for each response [R]
    where each chose its own.
    """


def choose_for_log(accounts: Sequence[Account], judge: Judge, tokens: LoggedTokens) -> Fitted:
    """The other half of the responses takes the account with the least loss on one half."""
    if len(accounts) == 1:
        return Fitted(accounts[0], np.zeros(1))
    losses = [judge.loss(each) for each in accounts]
    halves = tokens.halves
    choice_T = np.empty(len(tokens.rows), dtype=np.int64)
    for half in (False, True):
        choice_T[halves == half] = _least(losses, halves != half)
    return Fitted(_by_token(accounts, choice_T), np.array([float(_least(losses, np.ones_like(halves)))]))


def choose_for_responses(accounts: Sequence[Account], judge: Judge, tokens: LoggedTokens) -> Fitted:
    """Each response takes the account of least loss: its even tokens choose for its odd ones, and the reverse.

    Another account replaces the first, which is as declared, where its loss is less by _MARGIN. A response for which an
    account predicts nothing gets no prediction.
    """
    losses = np.stack([np.nan_to_num(judge.loss(each)) for each in accounts])
    is_known_by = np.stack([np.isfinite(judge.loss(each)) for each in accounts])
    losses = np.where(is_known_by.all(axis=0), losses, 0.0)
    parity = tokens.places % 2 == 1
    sums = np.stack([[_by_row(of_account * (parity == odd), tokens) for of_account in losses] for odd in (False, True)])
    sums[:, 1:] += _MARGIN
    silent = np.stack([_by_row(says.astype(np.float64), tokens) == 0 for says in is_known_by]) & _counted_responses(
        judge, tokens
    )
    sums[:, silent] = -np.inf
    choice_T = np.where(parity, sums[0].argmin(axis=0)[tokens.rows], sums[1].argmin(axis=0)[tokens.rows])
    choices = np.where(silent.any(axis=0), 0, sums.sum(axis=0).argmin(axis=0))
    return Fitted(_by_token(accounts, choice_T), choices.astype(np.float64))


def fit_temperature(
    curve: TemperatureCurve, declared_temperatures: Floats, floor: Floor, judge: Judge, tokens: LoggedTokens
) -> Fitted:
    """The temperature of all responses. What it is divided by shrinks the errors of the logits too.

    declared_temperatures [T]: each token's declared temperature, at which the floor was measured.
    """

    def account(temperature: float) -> Account:
        return judge.account(curve.at(temperature), floor, float(np.median(declared_temperatures)) / temperature)

    def best_temperature(counts: Bools) -> float:
        def loss(log_temperature: float) -> float:
            return float(np.nanmean(judge.loss(account(float(np.exp(log_temperature))))[counts]))

        grid = np.log(1 / INVERSE_TEMPERATURES)
        at_grid = [loss(point) for point in grid]
        best = int(np.argmin(at_grid))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        minimum = minimize_scalar(loss, bounds=(min(around), max(around)), method="bounded", options={"xatol": 1e-5})
        return float(np.exp(minimum.x if minimum.fun < at_grid[best] else grid[best]))

    halves = tokens.halves
    accounts = [account(best_temperature(halves)), account(best_temperature(~halves))]
    return Fitted(_by_token(accounts, halves.astype(np.int64)), np.array([best_temperature(np.ones_like(halves))]))


def _counted_responses(judge: Judge, tokens: LoggedTokens) -> Bools:
    """Responses with a token that counts [R]."""
    return _by_row(judge.is_counted.astype(np.float64), tokens) > 0


def _least(losses: Sequence[Floats], counts: Bools) -> int:
    sums = [
        float(np.nanmean(of_account[counts])) if np.isfinite(of_account[counts]).any() else np.inf
        for of_account in losses
    ]
    return int(np.argmin(sums))


def _by_token(accounts: Sequence[Account], choice_T: np.ndarray) -> Account:
    at = np.arange(len(choice_T))
    return Account(
        np.stack([account.prediction for account in accounts])[choice_T, at],
        np.stack([account.unit for account in accounts])[choice_T, at],
    )


def _by_row(values: Floats, tokens: LoggedTokens) -> Floats:
    return np.asarray(np.bincount(tokens.rows, weights=values, minlength=tokens.num_responses), dtype=np.float64)
