"""What sums that ranks add up tell of how two sides depart: by a shift, exchanged rows, a place or a temperature."""

import math
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from scipy.special import stdtrit

from mismatch_probe.stats.rounding import LeastSquares, temperature_columns
from mismatch_probe.stats.sequences import Floats, Ints, Mask, Sequences, TokenPair
from mismatch_probe.stats.totals import AddableTotals

_CERTAIN: Final = 1e-3
_CONFIDENCE: Final = 0.95
"""One-sided, of a step's fit: the guard asks for two steps in a row, and leaves a tenth besides."""
_LEAST_FREEDOM: Final = 1.1
"""Of a fit's error: with fewer degrees of freedom it hangs on one prompt."""


@dataclass(frozen=True)
class TemperatureTotals(AddableTotals):
    """Sums over parts of fits of T_pi / T_mu to d (`stats.temperature`).

    A part's weight is the square of the surprise that its entropies leave. The error of a part that hangs on one prompt
    follows from other parts alone; the sums in `lone` are over such parts.
    """

    signed_sums = ("departures", "lone_departures", "lone_products")

    information: float = 0.0
    """The weights."""
    departures: float = 0.0
    """Weight times the coefficient of the fit."""
    errors: float = 0.0
    """Squares of the weight times the standard error of the coefficient."""
    errors_squared: float = 0.0
    """Squares of these, each over its degrees of freedom."""
    lone: float = 0.0
    """The weights of parts that hang on one prompt."""
    lone_departures: float = 0.0
    """These weights times their coefficients; squares and products of both follow."""
    lone_squared: float = 0.0
    lone_products: float = 0.0
    lone_departures_squared: float = 0.0

    @classmethod
    def of(cls, diff: Floats, log_pi: Floats, entropy: Floats, prompts: Ints) -> Self:
        """Of tokens [T], each with the number of its prompt, whose responses may be copies of each other for long;
        nothing where nothing surprises pi.
        """
        if np.std(log_pi + entropy) < _CERTAIN:
            return cls()
        fit = LeastSquares(temperature_columns(log_pi, entropy), diff)
        information = fit.first_information()
        if information == 0:
            return cls()
        departures = float(information * fit.coefficients[0])
        error, freedom = fit.first_error(prompts)
        if freedom < _LEAST_FREEDOM:
            return cls(
                lone=information,
                lone_departures=departures,
                lone_squared=information**2,
                lone_products=information * departures,
                lone_departures_squared=departures**2,
            )
        errors = (information * error) ** 2
        return cls(information, departures, errors, errors**2 / freedom)

    @property
    def ratio(self) -> float:
        """T_pi / T_mu, nearer to 1 by as many standard errors as Student's t has at `_CONFIDENCE`, more where the fit
        hangs on a few prompts; 1 where within, and where the data cannot show it.
        """
        sums = self._with_lone_parts()
        if sums.information == 0:
            return 1.0
        departure = -sums.departures / sums.information
        freedom = sums.errors**2 / sums.errors_squared if sums.errors_squared > 0 else math.inf
        quantile = float(stdtrit(freedom, _CONFIDENCE))
        doubt = quantile * math.sqrt(sums.errors) / sums.information
        return 1 + math.copysign(max(0.0, abs(departure) - doubt), departure)

    def _with_lone_parts(self) -> Self:
        """Their error is how far their coefficients are from that of all; without them where they are too few."""
        freedom = self.lone**2 / self.lone_squared if self.lone_squared > 0 else 0.0
        if freedom < _LEAST_FREEDOM:
            return self
        information, departures = self.information + self.lone, self.departures + self.lone_departures
        slope = departures / information
        squares = self.lone_departures_squared - 2 * slope * self.lone_products + slope**2 * self.lone_squared
        errors = max(0.0, squares) * freedom / (freedom - 1)
        return type(self)(information, departures, self.errors + errors, self.errors_squared + errors**2 / freedom)


Metrics = dict[str, float]

FAR_NATS: Final = 3.0
"""A token of which one side is 20 times as sure as the other."""
_LEAST_VARIANCE: Final = 1e-24
_LEAST_DOUBT: Final = 1e-3
"""Mean of 1 - p over tokens; of a surer policy FP32 has no digits for the error of a 16-bit logit."""


@dataclass(frozen=True)
class ShiftTotals(AddableTotals):
    """Of tokens that have a neighbour at one side in their response: squares of d, and of log pi there less log mu.

    The d are of tokens that are read on both sides after the shift too, weighted to as many, or one that it drops would
    be all that a shift seems to explain. Responses without such a token say nothing.
    """

    squares: float = 0.0
    shifted_squares: float = 0.0

    @classmethod
    def of(cls, pair: TokenPair, shift: int) -> Self:
        """`shift`: where pi is read, in tokens from where mu is."""
        place, neighbour = pair.sequences.neighbours(shift)
        both = np.intersect1d(place, neighbour, assume_unique=True)
        responses = pair.sequences.spread(np.arange(pair.sequences.num_sequences))
        counts, of_both = (np.bincount(responses[i], minlength=pair.sequences.num_sequences) for i in (place, both))
        weights = np.divide(counts, of_both, out=np.zeros(counts.size), where=of_both > 0)
        shifted_diff = (pair.log_pi[neighbour] - pair.log_mu[place])[of_both[responses[place]] > 0]
        return cls(float(weights[responses[both]] @ pair.diff[both] ** 2), float(shifted_diff @ shifted_diff))

    @property
    def rest(self) -> float:
        """Root mean square of d after the shift over that before it; 1 where nothing was apart."""
        return math.sqrt(self.shifted_squares / self.squares) if self.squares > 0 else 1.0


@dataclass(frozen=True)
class DepartureTotals(AddableTotals):
    """Of log pi, log mu and d [nats] of tokens."""

    counts = ("tokens", "far_below", "far_above", "responses", "responses_below")
    signed_sums = ("log_pi", "log_mu", "doubts", "first_doubts", "those_doubts")

    tokens: float = 0.0
    log_pi: float = 0.0
    log_mu: float = 0.0
    log_pi_squared: float = 0.0
    log_mu_squared: float = 0.0
    squares: float = 0.0
    abs_diff: float = 0.0
    doubts: float = 0.0
    """Of 1 - p, the mean of both sides."""
    far_below: float = 0.0
    """`far_below` and `far_above`: tokens whose d is beyond `FAR_NATS`."""
    far_above: float = 0.0
    far_squares: float = 0.0
    """Squares of d of both."""
    responses: float = 0.0
    responses_below: float = 0.0
    """Those with a token far below; their abs_diff and doubts are summed in `first_*` over the tokens before it, in
    `those_*` over all.
    """
    first_abs_diff: float = 0.0
    first_doubts: float = 0.0
    those_abs_diff: float = 0.0
    those_doubts: float = 0.0
    pi_later: ShiftTotals = field(default_factory=ShiftTotals)
    pi_earlier: ShiftTotals = field(default_factory=ShiftTotals)

    @classmethod
    def of(cls, pair: TokenPair) -> Self:
        """Of all its tokens."""
        log_pi, log_mu, diff = pair.log_pi.astype(np.float64), pair.log_mu.astype(np.float64), pair.diff
        is_below, is_above = diff < -FAR_NATS, diff > FAR_NATS
        far_diff: Floats = diff[is_below | is_above]
        doubts = 1 - (pair.prob_pi + pair.prob_mu) / 2
        sequences = pair.sequences
        is_of_those = sequences.spread(sequences.sum_by_sequence(is_below) > 0)
        is_before_far = is_of_those & (_count_within(sequences, is_below) == 0)
        return cls(
            tokens=float(diff.size),
            log_pi=float(log_pi.sum()),
            log_mu=float(log_mu.sum()),
            log_pi_squared=float(log_pi @ log_pi),
            log_mu_squared=float(log_mu @ log_mu),
            squares=float(diff @ diff),
            abs_diff=float(pair.abs_diff.sum()),
            doubts=float(doubts.sum()),
            far_below=float(is_below.sum()),
            far_above=float(is_above.sum()),
            far_squares=float(far_diff @ far_diff),
            responses=float(sequences.num_sequences),
            responses_below=float((sequences.sum_by_sequence(is_below) > 0).sum()),
            first_abs_diff=float(pair.abs_diff[is_before_far].sum()),
            first_doubts=float(doubts[is_before_far].sum()),
            those_abs_diff=float(pair.abs_diff[is_of_those].sum()),
            those_doubts=float(doubts[is_of_those].sum()),
            pi_later=ShiftTotals.of(pair, 1),
            pi_earlier=ShiftTotals.of(pair, -1),
        )

    def metrics(self) -> Metrics:
        """By their names after `mismatch/`.

        `scale_slope` is that of d by (log pi + log mu) / 2, which two sides that differ at random leave at 0, and
        `scale_share` the part of d's variance that it explains. `shift_left` is the smaller `ShiftTotals.rest`.
        `logit_error` is the mean of abs(d) over that of 1 - p: an error e of a logit against the others' moves a
        log-prob by (1 - p) e. `error_before_far` is that of the tokens before the first one far below, over that of
        all tokens of these responses; 1 where there is none.
        """
        slope, share = self._on_the_logit_scale()
        return {
            "logprob_pi": self.log_pi / self.tokens,
            "logprob_mu": self.log_mu / self.tokens,
            "logprob_mu_rms": math.sqrt(self.log_mu_squared / self.tokens),
            "scale_slope": slope,
            "scale_share": share,
            "shift_left": min(self.pi_later.rest, self.pi_earlier.rest),
            "logit_error": self.abs_diff / max(self.doubts, _LEAST_DOUBT * self.tokens),
            "error_before_far": self._error_before_far(),
            "far_below_share": self.far_below / self.tokens,
            "far_above_share": self.far_above / self.tokens,
            "far_squares_share": self.far_squares / self.squares if self.squares > 0 else 0.0,
            "far_responses_share": self.responses_below / self.responses,
        }

    def _error_before_far(self) -> float:
        if min(self.first_doubts, self.those_abs_diff) <= 0:
            return 1.0
        return self.first_abs_diff / self.first_doubts * self.those_doubts / self.those_abs_diff

    def _on_the_logit_scale(self) -> tuple[float, float]:
        of_pi = self.log_pi_squared / self.tokens - (self.log_pi / self.tokens) ** 2
        of_mu = self.log_mu_squared / self.tokens - (self.log_mu / self.tokens) ** 2
        of_diff = self.squares / self.tokens - ((self.log_pi - self.log_mu) / self.tokens) ** 2
        of_middle = (of_pi + of_mu) / 2 - of_diff / 4
        if min(of_middle, of_diff) <= _LEAST_VARIANCE:
            return 0.0, 0.0
        mean_of_sides = (of_pi - of_mu) / 2
        return mean_of_sides / of_middle, min(1.0, mean_of_sides**2 / (of_middle * of_diff))


def _count_within(sequences: Sequences, is_chosen: Mask) -> Ints:
    """Of each token, how many of those chosen its response has up to it [T]."""
    counts = np.cumsum(is_chosen)
    counts_before = np.concatenate([[0], counts])[sequences.offsets[:-1]]
    return counts - sequences.spread(counts_before)


_STANDARD_ERRORS: Final = 3.0
_VARIANCE_OF_ENTROPY: Final = 5.0
"""Nats: variance of log pi over its entropy for a choice of two tokens, one of them with a probability of 0.002."""


@dataclass(frozen=True)
class SurpriseTotals(AddableTotals):
    """Of log pi + H, the surprise of a token, which is 0 in expectation for tokens drawn from pi, and of H [nats]."""

    counts = ("tokens",)
    signed_sums = ("surprise", "entropies")

    tokens: float = 0.0
    surprise: float = 0.0
    squares: float = 0.0
    entropies: float = 0.0

    @classmethod
    def of(cls, log_pi: Floats, entropy: Floats) -> Self:
        """Of tokens [T]."""
        surprise = log_pi + entropy
        return cls(float(len(surprise)), float(surprise.sum()), float(surprise @ surprise), float(entropy.sum()))

    @property
    def mean(self) -> float:
        return self.surprise / self.tokens

    @property
    def error(self) -> float:
        """The standard error of the mean.

        The terms are differences of a martingale, so they do not correlate. Where no unlikely token came up they vary
        too little; their variance is then taken from the entropy.
        """
        variance = max(self.squares, _VARIANCE_OF_ENTROPY * self.entropies) / self.tokens
        return math.sqrt(variance / self.tokens)

    @property
    def excess(self) -> float:
        """How far_diff the mean is from 0, less three standard errors, nats; 0 where within."""
        return max(0.0, abs(self.mean) - _STANDARD_ERRORS * self.error)
