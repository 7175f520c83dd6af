"""The tail of a mean: what events may add to it that are too rare for the sample to show.

No interval includes events that a sample lacks. Two fits estimate what they may add to a mean of positive terms: single
tokens by a generalised Pareto tail of abs(d), prompts by a log-normal tail of the prompts' own means. A gate compares
its limit with the interval's bound and both (`Estimate.tail_bound`).

The effective share of a weighted sample counts that responses have different error rates. A response of rate q (1 on
average) has an S that is close to normal, with variance q V and mean m q V at a length; over all responses S has the
variance V + (m V)^2 Var(q). Then ESS / n = (E e^S)^2 / E e^(2 S) = M((m + 1/2) V)^2 / M((2 m + 2) V) with
M(c) = E e^(c q), a mean over the sample. Equal rates (q = 1) give exp(-V) for every m, the share of log-normal weights
[Kong, Liu and Wong 1994, JASA 89:278]; different rates lose more, and sooner.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import special

from mismatch_probe.stats.results import LEVEL, Estimate, normal_quantile
from mismatch_probe.stats.sequences import Floats, Ints

TermFunction = Callable[[Floats], Floats]
"""The function from abs(d) of a token to its term of a mean; it increases."""

SHARE_OF_TOKENS: Final = 0.005
FEWEST_TOKENS: Final = 20
SHARE_OF_PROMPTS: Final = 0.25
FEWEST_PROMPTS: Final = 4
RARE_UP_TO: Final = 5.0
"""The largest abs(d) that counts without a clip, nats; beyond it a correction cuts the token's weight."""
ALL_MAY_LACK: Final = round(-math.log(1 - LEVEL), 1)
"""Events of a smaller expected number are all absent from more than 1 - LEVEL of samples (rule of three)."""
_ERRORS_OF_SD: Final = normal_quantile(LEVEL)
FEWEST_OF_K_HAT: Final = 5
_PRIOR_SHAPE: Final = 0.5
_PRIOR_VALUES: Final = 10
_POINTS = 400
_LARGEST_LOG = 700.0
_FARTHEST = 6.0
"""Standard deviations from where a log-normal tail begins to where its integral ends."""
_STEPS = 120
_QUANTILES = 256
_MOST_TOKENS = 200_000


@dataclass(frozen=True)
class ErrorTail:
    """P(abs(d) > x) = share * (1 + shape * (x - threshold) / scale)^(-1 / shape), up to `most` nats."""

    threshold: float
    scale: float
    shape: float
    shape_error: float
    """The standard error of the shape, clustered by prompt."""
    share: float
    tokens_per_prompt: float
    """The number of tokens of the tail in one prompt, beyond chance."""
    num_tokens: int
    most: float
    scales: "ScaleTail | None" = None

    def rest(self, terms: TermFunction, level: float, times: float = 1.0) -> float:
        """What tokens beyond the abs(d) that one prompt alone is expected to exceed may add to the mean of `terms`.

        The shape is its upper bound at the two-sided `level`. times: for a sample so many times as large.
        """
        share_of_one_prompt = min(self.tokens_per_prompt / (self.num_tokens * times), self.share)
        shape = self.shape + special.ndtri((1 + level) / 2) * self.shape_error / math.sqrt(times)
        first = self.threshold + self.scale * float(special.boxcox(self.share / share_of_one_prompt, shape))
        if not first < self.most:
            return float(terms(np.array([self.most]))[0]) * share_of_one_prompt
        x = first + (self.most - first) * np.linspace(0, 1, _POINTS) ** 3
        with np.errstate(divide="ignore"):
            excess = np.minimum((x - self.threshold) / self.scale, math.inf if shape >= 0 else -1 / shape)
            shares_beyond = self.share / special.inv_boxcox(excess, shape)
        values = terms(x)
        return float(
            values[0] * shares_beyond[0] + (np.diff(values) * (shares_beyond[1:] + shares_beyond[:-1]) / 2).sum()
        )


def error_tail(abs_diff: Floats, totals_of: Callable[[Floats], Floats], most: float) -> ErrorTail | None:
    """The tail of abs(d) [T], or of abs(S), from its largest half percent; None where all are 0.

    totals_of: the totals of values [T] by prompt [G]. The shape is the moment estimator's [Dekkers, Einmahl and de Haan
    1989, Annals of Statistics 17:1833], its error the cluster jackknife's. Where too few values differ from 0 to show a
    shape, the tail is exponential with the largest of them as its mean.
    """
    num_tokens, num_moved = abs_diff.size, np.count_nonzero(abs_diff)
    largest = float(abs_diff.max())
    num_in_tail = max(math.ceil(SHARE_OF_TOKENS * num_tokens), FEWEST_TOKENS)
    if num_moved == 0:
        return None
    few = ErrorTail(0.0, largest, 0.0, 0.0, num_moved / num_tokens, 1.0, num_tokens, most)
    if num_moved <= num_in_tail:
        return few
    threshold = float(np.partition(abs_diff, -num_in_tail - 1)[-num_in_tail - 1])
    is_beyond = abs_diff > threshold
    logs = np.zeros(num_tokens)
    logs[is_beyond] = np.log(abs_diff[is_beyond] / threshold)
    columns = np.stack([totals_of(values) for values in (is_beyond.astype(np.float64), logs, logs**2)])
    totals = columns.sum(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        shapes, scales = _shape_and_scale(np.concatenate([totals, totals - columns], axis=1))
        without_one = shapes[1:]
        error = math.sqrt((without_one.size - 1) / without_one.size * ((without_one - without_one.mean()) ** 2).sum())
    if not (math.isfinite(shapes[0]) and math.isfinite(error)):
        return few
    num_beyond = columns[0]
    share, tokens_per_prompt = (
        float(num_beyond.sum()) / num_tokens,
        max(float((num_beyond**2).sum() / num_beyond.sum() - num_beyond.mean()), 1.0),
    )
    scale, shape = threshold * float(scales[0]), float(shapes[0])
    return ErrorTail(threshold, scale, shape, error, share, tokens_per_prompt, num_tokens, most)


def _shape_and_scale(totals: Floats) -> tuple[Floats, Floats]:
    """The shape and the relative scale from totals [3, G] beyond the threshold: number, log excess and its square."""
    first, second = totals[1] / totals[0], totals[2] / totals[0]
    below_zero = 1 - 0.5 / (1 - first**2 / second)
    return first + below_zero, first * (1 - np.minimum(below_zero, 0))


def pareto_k(log_weights: Floats) -> float | None:
    """The shape k-hat of a generalised Pareto tail of the largest weights [N]; None where too few, or equal, weights
    show no tail.

    The tail is the largest min(N / 5, 3 sqrt(N)) weights [Vehtari et al. 2024, JMLR 25:72], its shape the posterior
    mean of Zhang and Stephens (2009, Technometrics 51:316), drawn to 0.5 with the weight of ten values, as in PSIS.
    """
    num_in_tail = math.ceil(min(log_weights.size / 5, 3 * math.sqrt(log_weights.size)))
    if num_in_tail < FEWEST_OF_K_HAT:
        return None
    largest = np.sort(log_weights)[-num_in_tail - 1 :]
    weights = np.exp(largest - largest[-1])
    excess = weights[1:] - weights[0]
    excess = excess[excess > 0]
    if excess.size < FEWEST_OF_K_HAT:
        return None
    num_candidates = 30 + math.isqrt(excess.size)
    quartile = excess[int(excess.size / 4 + 0.5) - 1]
    rates = (1 - np.sqrt(num_candidates / (np.arange(1, num_candidates + 1) - 0.5))) / (3 * quartile) + 1 / excess[-1]
    shapes = np.log1p(-rates[:, None] * excess).mean(axis=1)
    with np.errstate(invalid="ignore"):
        scales = np.where(rates == 0, 1 / excess.mean(), -rates / shapes)
    log_likelihoods = excess.size * (np.log(scales) - shapes - 1)
    rate = float(np.average(rates, weights=special.softmax(log_likelihoods)))
    shape = float(np.log1p(-rate * excess).mean())
    return (len(excess) * shape + _PRIOR_VALUES * _PRIOR_SHAPE) / (len(excess) + _PRIOR_VALUES)


def most_pareto_k(num_weights: int) -> float:
    """The k-hat above which a mean of so many weights is not to be believed [Vehtari et al. 2024, equation 13]."""
    return min(1 - 1 / math.log10(num_weights), 0.7)


@dataclass(frozen=True)
class PromptTail:
    """Log-normal tail of the means of single prompts beyond `edge`, which a share `beyond` of them exceeds.

    Where too few prompts have a mean above 0, `sd_log` is NaN and the edge is the largest mean.
    """

    edge: float
    beyond: float
    sd_log: float
    num_prompts: int

    def rest(self, times: float = 1.0, most: float = math.inf) -> float:
        """What prompts beyond the value that three are expected to exceed may add to the mean over prompts.

        The standard deviation of the logs is at the upper bound of its interval. most: the largest mean of a prompt.
        """
        share = self.share_beyond(times)
        if math.isnan(self.sd_log):
            return min(self.edge, most) * share
        mean_log, sd_log = self.log_normal(times)
        deviate = float(special.ndtri(1 - share))
        first = math.exp(min(mean_log + sd_log * deviate, _LARGEST_LOG))
        mean = math.exp(min(mean_log + sd_log**2 / 2, _LARGEST_LOG))
        return min(mean * float(special.ndtr(sd_log - deviate)) - first * share, most * share)

    def share_beyond(self, times: float) -> float:
        """The share of the prompts beyond the value that three of the sample are expected to exceed."""
        return min(ALL_MAY_LACK / (self.num_prompts * times), SHARE_OF_PROMPTS)

    def log_normal(self, times: float) -> tuple[float, float]:
        """Mean and standard deviation of the logs, the latter at the upper bound of its interval."""
        sd_log = self.sd_log * (1 + _ERRORS_OF_SD / math.sqrt(self.beyond * self.num_prompts * times))
        return math.log(self.edge) - sd_log * float(special.ndtri(1 - self.beyond)), sd_log


def prompt_tail(values: Floats) -> PromptTail:
    """The tail of the values of single prompts [G], from the largest quarter.

    The log excess over that quarter's edge gives the standard deviation (a normal's mean excess).
    """
    num_prompts = values.size
    own = np.sort(values[np.isfinite(values) & (values > 0)])[::-1]
    num_in_tail = min(int(SHARE_OF_PROMPTS * num_prompts), own.size - 1)
    if num_in_tail < FEWEST_PROMPTS:
        return PromptTail(float(own[0]) if own.size else 0.0, math.nan, math.nan, num_prompts)
    edge, share = float(own[num_in_tail]), num_in_tail / num_prompts
    deviate = float(special.ndtri(1 - share))
    mean_excess = math.exp(-(deviate**2) / 2) / math.sqrt(2 * math.pi) / share - deviate
    sd_log = float(np.log(own[:num_in_tail] / edge).mean()) / mean_excess
    return PromptTail(edge, share, sd_log, num_prompts)


@dataclass(frozen=True)
class ScaleTail:
    """The tail of the prompts' mean abs(d) (nats), and quantiles [K] of a token's abs(d) over its prompt's mean."""

    prompts: PromptTail
    noise: Floats

    def rest(self, terms: TermFunction, most: float, times: float = 1.0) -> float:
        """`PromptTail.rest` for the mean of `terms` of abs(d) up to `most`; 0 where too few prompts show a scale."""
        if math.isnan(self.prompts.sd_log):
            return 0.0
        mean_log, sd_log = self.prompts.log_normal(times)
        first = float(special.ndtri(1 - self.prompts.share_beyond(times)))
        deviates = np.linspace(first, first + _FARTHEST, _STEPS)
        scales = np.exp(np.minimum(mean_log + sd_log * deviates, _LARGEST_LOG))
        means = terms(np.minimum(scales[:, None] * self.noise, most)).mean(axis=1)
        density = np.exp(-(deviates**2) / 2) / math.sqrt(2 * math.pi)
        return float(np.trapezoid((means - means[0]) * density, deviates))


def scale_tail(abs_diff: Floats, prompt: Ints, num_prompts: int) -> ScaleTail:
    """The scale tail of abs(d) [T]; `prompt` [T] numbers each token's prompt from 0."""
    counts = np.bincount(prompt, minlength=num_prompts)
    means = np.bincount(prompt, weights=abs_diff, minlength=num_prompts) / np.maximum(counts, 1)
    of_prompt = means[prompt]
    tokens = np.flatnonzero(of_prompt > 0)
    tokens = tokens[:: max(1, tokens.size // _MOST_TOKENS)]
    noise = abs_diff[tokens] / of_prompt[tokens]
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    # Sorted first, for so many quantiles are found several times faster then.
    return ScaleTail(prompt_tail(means), np.quantile(np.sort(noise), places) if tokens.size else np.zeros(1))


_TABLE_POINTS: Final = 96
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
        return math.log(1 / self.ess) * np.linspace(_LOW, _HIGH, _TABLE_POINTS)

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
        place = (exponents / math.log(1 / self.ess) - _LOW) / (_HIGH - _LOW) * (_TABLE_POINTS - 1)
        first: Ints = np.clip(place.astype(np.int64), 0, _TABLE_POINTS - 2)
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
