"""The law of spread, Var(S | T) = a τ(T)^b, from totals: many jackknife samples at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints

_ROUNDING = 1e-9
_LARGEST_LOG = 300.0


@dataclass(frozen=True)
class Ahead:
    """How the law goes on beyond the data: τ keeps the slope of its last octaves, in logs (`growth`) or plain (`rate`).

    as_bias: what makes the exponent more than 1 is a bias of each response, so that the variance goes on as a random
    walk's and a bias's together, a τ + c τ^2, with the value and the slope it has at the end of the data.
    """

    keeps: Literal["growth", "rate"]
    octaves: int
    as_bias: bool = False


@dataclass(frozen=True)
class Law:
    """log a and b [G], and log τ [K, G] at the logs of K lengths, for G samples."""

    log_a: Floats
    b: Floats
    log_tau: Floats
    log_lengths: Floats

    def log_length(self, log_variance: float | Floats, ahead: Ahead) -> Floats:
        """log of the length at which the variance is reached [G], τ interpolated between the lengths measured."""
        wanted = np.asarray((log_variance - self.log_a) / self.b)
        if ahead.as_bias:
            wanted = np.where(wanted > self.log_tau[-1], self._log_tau_as_bias(log_variance), wanted)
        before = np.clip((self.log_tau <= wanted).sum(axis=0) - 1, 0, self.log_lengths.size - 2)
        samples = np.arange(before.size)
        x, next_x = self.log_tau[before, samples], self.log_tau[before + 1, samples]
        y, next_y = self.log_lengths[before], self.log_lengths[before + 1]
        within = y + (wanted - x) * (next_y - y) / (next_x - x)
        return np.where(wanted > self.log_tau[-1], self._log_length_beyond(wanted, ahead), within)

    def log_variance(self, log_length: float, ahead: Ahead) -> float:
        """log of the variance at a length, of the first sample."""
        last = float(self.log_lengths[-1])
        log_tau = float(np.interp(log_length, self.log_lengths, self.log_tau[:, 0]))
        if log_length > last:
            slope = float(self._slope(ahead)[0])
            step = log_length - last
            log_tau += slope * step if ahead.keeps == "growth" else math.log1p(slope * math.expm1(step))
        return float(self.log_a[0] + self.b[0] * log_tau)

    def _log_tau_as_bias(self, log_variance: float | Floats) -> Floats:
        """log τ at which (2 - b) y + (b - 1) y^2 = Var / Var(end), y = τ / τ(end)."""
        last = self.log_tau[-1]
        ratio = np.exp(np.minimum(log_variance - (self.log_a + self.b * last), _LARGEST_LOG))
        walk, bias = 2 - np.clip(self.b, 1, 2), np.clip(self.b, 1, 2) - 1
        return np.asarray(last + np.log(2 * ratio / (walk + np.sqrt(walk**2 + 4 * bias * ratio))))

    def _log_length_beyond(self, log_tau: Floats, ahead: Ahead) -> Floats:
        step = log_tau - self.log_tau[-1]
        slope = self._slope(ahead)
        onward = step / slope if ahead.keeps == "growth" else np.log1p(np.expm1(step) / slope)
        return np.asarray(self.log_lengths[-1] + onward)

    def _slope(self, ahead: Ahead) -> Floats:
        """Of log τ in log T, or of τ in T as a share of their last values [G]; 1 where all positions err alike."""
        start = self.log_lengths[-1] - ahead.octaves * math.log(2)
        first = min(int(np.searchsorted(self.log_lengths, start - _ROUNDING)), self.log_lengths.size - 2)
        rise, run = self.log_tau[-1] - self.log_tau[first], self.log_lengths[-1] - self.log_lengths[first]
        return np.asarray(rise / run if ahead.keeps == "growth" else np.expm1(-rise) / np.expm1(-run))


@dataclass(frozen=True)
class Prefixes:
    """The lengths that totals were taken at: `ends` of bins from the first token on [J], of which K are `fitted`.

    weights: of the fitted lengths [K].
    """

    ends: Ints
    fitted: Ints
    weights: Floats

    def law(self, columns: Sequence[Floats]) -> Law:
        """The law of totals [3 K + 2 J, G]: at fitted lengths responses that reach them, S and S^2; in bins d^2 and
        tokens.
        """
        num_fitted = self.fitted.size
        stacked = np.stack(columns)
        count, total, squares = stacked[: 3 * num_fitted].reshape(3, num_fitted, -1)
        errors, tokens = stacked[3 * num_fitted :].reshape(2, self.ends.size, -1)
        log_variance = np.log((squares - total**2 / count) / (count - 1))
        widths = np.diff(self.ends, prepend=0)[:, None]
        mean_square = errors.sum(axis=0) / tokens.sum(axis=0)
        log_tau = np.log(np.cumsum(errors / tokens * widths, axis=0)[self.fitted] / mean_square)
        share = (self.weights / self.weights.sum())[:, None]
        center = (share * log_tau).sum(axis=0)
        b = (share * (log_tau - center) * log_variance).sum(axis=0) / (share * (log_tau - center) ** 2).sum(axis=0)
        log_a = (share * log_variance).sum(axis=0) - b * center
        return Law(log_a, b, log_tau, np.log(self.ends[self.fitted]))
