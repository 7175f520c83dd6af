"""The effective share of a weighted sample, also where responses have different error rates.

A response of rate q (1 on average) has an S that is close to normal, with variance q V and mean m q V at a length; over
all responses S has the variance V + (m V)^2 Var(q). Then ESS / n = (E e^S)^2 / E e^(2 S) = M((m + 1/2) V)^2 /
M((2 m + 2) V) with M(c) = E e^(c q), a mean over the sample. Equal rates (q = 1) give exp(-V) for every m, the share of
log-normal weights [Kong, Liu and Wong 1994, JASA 89:278]; different rates lose more, and sooner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Ints

_POINTS: Final = 96
_LOW, _HIGH = -0.5, 3.0
"""The exponents c of the table, over ln(1 / ESS): m is between -1 and 1/2."""
_TRIALS: Final = 64
_LEAST, _MOST = 1e-3, 1.15
"""Trial values of V, over ln(1 / ESS)."""
DRIFT_KNOWN: Final = 4.0
"""The prior for m: -1/2, as tokens sampled from mu have it (E e^d = 1), weighs as much as this summed variance of S."""


def relative_rates(squares: Floats, fourths: Floats, counts: Floats) -> Floats:
    """The rate q of each response [N], 1 on average: its mean of d^2 over the mean at its positions.

    squares, fourths, counts: sums of d^2, of d^4 and of tokens in each bin of positions [N, K]. Rates are shrunk
    towards 1, so that the noise of their tokens adds nothing to their variance.
    """
    tokens, sums = counts.sum(axis=0), squares.sum(axis=0)
    usable = (tokens > 0) & (sums > 0)
    means = sums[usable] / tokens[usable]
    lengths = counts[:, usable].sum(axis=1)
    if not usable.any():
        return np.ones(counts.shape[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (squares[:, usable] / means).sum(axis=1) / lengths
        noise = ((fourths[:, usable] / means**2).sum(axis=1) / lengths - rates**2) / lengths
    has_tokens = lengths > 0
    spread, noise_variance = float(rates[has_tokens].var()), float(noise[has_tokens].mean())
    shrinkage = math.sqrt(max(1 - noise_variance / spread, 0.0)) if spread > 0 else 0.0
    return np.where(has_tokens, 1 + shrinkage * (rates - 1), 1.0)


@dataclass(frozen=True)
class Mixture:
    """The rates [N] and the table of exponents [C] for one effective share."""

    rates: Floats
    ess: float

    @property
    def exponents(self) -> Floats:
        return math.log(1 / self.ess) * np.linspace(_LOW, _HIGH, _POINTS)

    def columns(self, sums: Floats, squares: Floats) -> Floats:
        """The columns of each response [N, C + 5] whose totals `log_variance` reads, from its S and sum of d^2."""
        table = np.exp(self.rates[:, None] * self.exponents)
        return np.column_stack([np.ones(sums.size), self.rates, self.rates**2, sums, squares, table])

    def log_variance(self, columns: Sequence[Floats]) -> Floats:
        """log of the Var(S) at which ESS / n falls to the wanted share [G], from totals [C + 5, G]."""
        log_share, log_variances = self._log_shares(np.stack(columns))
        log_target, log_loss = math.log(math.log(1 / self.ess)), np.log(-log_share)
        last = np.clip((log_loss < log_target).sum(axis=0) - 1, 0, _TRIALS - 2)
        samples = np.arange(last.size)
        x, next_x = log_loss[last, samples], log_loss[last + 1, samples]
        y, next_y = log_variances[last, samples], log_variances[last + 1, samples]
        return np.asarray(y + (log_target - x) * (next_y - y) / (next_x - x))

    def share(self, columns: Sequence[Floats], log_variance: Floats) -> Floats:
        """ESS / n of the first sample at Var(S) [K]."""
        log_share, log_variances = self._log_shares(np.stack(columns))
        variances = np.r_[0, np.exp(log_variances[:, 0])]
        return np.asarray(np.exp(np.interp(np.exp(log_variance), variances, np.r_[0, log_share[:, 0]])))

    def _log_shares(self, totals: Floats) -> tuple[Floats, Floats]:
        """log(ESS / n) and log Var(S) [K, G] at K trial values of V."""
        count, rates, squared_rates, sums, squares = totals[:5]
        drift = np.clip((sums - DRIFT_KNOWN / 2) / (squares + DRIFT_KNOWN), -1.0, 0.5)
        log_mean = np.log(totals[5:] / count)
        within = math.log(1 / self.ess) * np.geomspace(_LEAST, _MOST, _TRIALS)[:, None]
        scale = within / (rates / count)
        between = (drift * scale) ** 2 * (squared_rates / count - (rates / count) ** 2)
        log_share = 2 * self._log_mean_at(log_mean, (drift + 0.5) * scale) - self._log_mean_at(
            log_mean, (2 * drift + 2) * scale
        )
        return log_share, np.log(within + between)

    def _log_mean_at(self, log_mean: Floats, exponents: Floats) -> Floats:
        """log M [K, G] at exponents [K, G], by linear interpolation in the table [C, G]."""
        place = (exponents / math.log(1 / self.ess) - _LOW) / (_HIGH - _LOW) * (_POINTS - 1)
        first: Ints = np.clip(place.astype(np.int64), 0, _POINTS - 2)
        samples = np.arange(log_mean.shape[1])
        low, high = log_mean[first, samples], log_mean[first + 1, samples]
        return np.asarray(low + (place - first) * (high - low))


LOG_BOUND = 20.0


def relative_excess(log_ratios: Floats) -> Floats:
    """w / c - 1 for w = e^d, where only the weights' shares matter.

    c is 1, which is exact for tiny d; where a weight is beyond e^20 it is the largest weight, so that no sum overflows
    and no weight is bounded.
    """
    is_beyond = np.abs(log_ratios).max(initial=0.0) > LOG_BOUND
    return np.asarray(np.expm1(log_ratios - log_ratios.max() if is_beyond else log_ratios))


def squared_excess(log_ratios: Floats) -> Floats:
    """(w - 1)^2 for w = e^d."""
    return np.asarray(np.expm1(log_ratios) ** 2)


def with_hidden_tail(share: Estimate, log_weight_variance: Estimate, num_clusters: int) -> Estimate:
    """An effective share whose interval also contains that of log-normal weights [Kong, Liu and Wong 1994].

    Log-normal weights have the share exp(-variance), with the variance of the log-weights [JASA 89:278]. A few weights
    decide the share, and a sample without the largest ones shows a share that is too large and too certain; the logs
    of all weights show that larger ones must exist. A variance about the sample's own mean is too small by up to 1 in
    the number of clusters.
    """
    if share.low is None or share.high is None:
        return share
    if log_weight_variance.low is None or log_weight_variance.high is None:
        return replace(share, low=0.0, high=1.0)
    low = math.exp(-log_weight_variance.high * num_clusters / (num_clusters - 1))
    return replace(share, low=min(share.low, low), high=max(share.high, math.exp(-log_weight_variance.low)))
