"""The error that rounding alone makes in a log-prob, and the ratio of two temperatures.

A format's error is far larger on an unlikely token than on a certain one. So it is measured on the same tokens,
computed in the format and in FP32, and averaged over tokens of like probability.

Dividing logits by T turns p into p^(1/T) / Z, so log mu = b log pi - log Z with b = T_pi / T_mu and a Z that is the
same for every token of one context. To second order in b - 1, log Z = -(b - 1) H + (b - 1)^2 V / 2 with pi's entropy H
and the variance V of its log-probs (the cumulant generating function of log pi). So d = (1 - b) (log pi + H) + (a
function of the context that vanishes with H): linear in the token's own log-prob within a context, which no rounding,
prompt or weight error is.

Whether the deviation changes at places that are known is judged at tokens of like probability too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Final, NamedTuple

import numpy as np

from mismatch_probe.stats.estimator import Estimator, contrast, paired_contrast
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Conditioning, Estimate
from mismatch_probe.stats.sequences import Floats, Ints, Mask, Reals, TokenPair, difference

LEAST_NATS: Final = 1e-5
"""The difference between FP32 sums of a deep model that are added up in different orders."""
_LEAST_MEASURED_NATS: Final = -1.0
_TOKENS_A_BIN: Final = 100
_MOST_BINS: Final = 16
_TRIMMED: Final = 0.01


@dataclass(frozen=True)
class Floor:
    """The root mean square error (nats) of a format at log-probs between `edges` [B - 1].

    Tokens that another hypothesis makes less likely than the measured ones have a proportionally larger error, as
    their logits are larger.
    """

    edges: Floats
    sizes: Floats
    least: float = -np.inf

    @classmethod
    def measure(cls, errors: Floats, log_probs: Floats, counts: Mask) -> "Floor":
        """Measure the floor from a format's errors at tokens with these log-probs [T]."""
        is_finite = counts & np.isfinite(errors) & np.isfinite(log_probs)
        if not is_finite.any():
            return cls(np.empty(0), np.array([LEAST_NATS]))
        errors, log_probs = errors[is_finite], log_probs[is_finite]
        num_bins = int(np.clip(len(errors) // _TOKENS_A_BIN, 1, _MOST_BINS))
        edges = np.unique(np.quantile(log_probs, np.linspace(0, 1, num_bins + 1)[1:-1]))
        bins = np.searchsorted(edges, log_probs)
        squares = [trimmed_mean(errors[bins == number] ** 2) for number in range(len(edges) + 1)]
        least = float(log_probs[bins == 0].mean())
        return cls(edges, np.sqrt(np.nan_to_num(squares) + LEAST_NATS**2), min(least, _LEAST_MEASURED_NATS))

    def at(self, log_probs: Floats) -> Floats:
        """The floor at these log-probs [T]; one that is not finite counts as the lowest measured one."""
        finite = np.where(np.isfinite(log_probs), log_probs, self.least)
        ratio = np.maximum(finite / self.least, 1.0) if np.isfinite(self.least) else 1.0
        return np.asarray(self.sizes[np.searchsorted(self.edges, finite)] * ratio)

    def of_format(self, times: float) -> "Floor":
        """The floor of a format whose rounding is `times` as large."""
        beyond_least = np.sqrt(np.maximum(self.sizes**2 - LEAST_NATS**2, 0))
        return replace(self, sizes=np.hypot(beyond_least * times, LEAST_NATS))


def trimmed_mean(squares: Floats) -> float:
    """The mean without the largest hundredth, which single tokens would decide; NaN without values."""
    if not len(squares):
        return float("nan")
    num_remaining = max(1, round(len(squares) * (1 - _TRIMMED)))
    return float(np.partition(squares, num_remaining - 1)[:num_remaining].mean())


_RECORDED_NATS: Final = 1e-8
"""Errors below it are none: it is far less than a log-prob in FP32 is recorded to."""
QUANTILES: Final = (0.5, 0.9, 0.99)
LONE: Final = "lone"
_LONE_TIMES: Final = 30.0
"""A lone error is so many times as large as those of the reference and of the other side on the same token: rounding
is large on a token for all of them, or for none."""


def fp32_errors(pair: TokenPair) -> Floats:
    """The reference in FP32 less that in FP64 [T], nats, of a pair that has both."""
    assert pair.log_ref_fp32 is not None
    assert pair.log_ref_fp64 is not None
    return difference(pair.log_ref_fp32, pair.log_ref_fp64)


def conditioning(pair: TokenPair, level: float) -> Conditioning | None:
    """How far FP32 is from FP64 by rounding alone, and both sides from FP64; None without the reference in both.

    Rounding has heavy tails: a mean may rest on a few tokens, so that errors are compared at quantiles too, and the
    largest lone one with the largest of rounding. All errors are of the same tokens. At a quantile errors count as
    LEAST_NATS at least: on a certain token the model's error vanishes, and what is left is where a side's log-softmax
    rounds, which is another digit in each implementation.
    """
    if pair.log_ref_fp32 is None or pair.log_ref_fp64 is None:
        return None
    exact, estimator = pair.log_ref_fp64, Estimator(pair.sequences, level)
    legs = (pair.log_ref_fp32, pair.log_pi, pair.log_mu)
    rounding, *sides = (np.maximum(np.abs(difference(leg, exact)), _RECORDED_NATS) for leg in legs)
    means = [estimator.mean(errors, "token", Scale.POSITIVE) for errors in (rounding, *sides)]
    fp32, pi, mu = (
        estimator.bare(errors.mean(), "token") if mean is None else mean
        for mean, errors in zip(means, (rounding, *sides), strict=True)
    )
    times = [dict(_times_of_errors(estimator, errors, rounding, other)) for errors, other in permutations(sides)]
    return Conditioning(fp32, float(rounding.max()), pi, mu, *times)


def _times_of_errors(
    estimator: Estimator, errors: Floats, rounding: Floats, other: Floats
) -> Iterator[tuple[str, Estimate]]:
    """Errors [T] over those of rounding [T], by what of both is compared; other: errors of the other side [T]."""
    mean = paired_contrast(estimator.sequences, errors, rounding, estimator.level)
    yield "mean", estimator.bare(errors.mean() / rounding.mean(), "token") if mean is None else mean
    for share in QUANTILES:
        of_errors, of_rounding = (
            estimator.quantile(np.sort(values), values, share, "token")
            for values in (np.maximum(errors, LEAST_NATS), np.maximum(rounding, LEAST_NATS))
        )
        times = contrast(of_errors, of_rounding)
        if times is not None:
            yield f"p{share * 100:g}", times
    is_lone = errors > _LONE_TIMES * np.maximum(rounding, other)
    yield LONE, estimator.bare(errors[is_lone].max(initial=0.0) / rounding.max(), "token")


_LEAST_FREE = 1e-6


def temperature_columns(log_pi: Reals, entropy: Floats) -> Floats:
    """The columns in which d is linear [T, 3]: the surprise log pi + H, whose coefficient is 1 - b, and H and H^2."""
    return np.column_stack([log_pi + entropy, entropy, entropy**2])


class LeastSquares:
    """`values` [T] by `columns` [T, C], without an intercept: coefficients [C] and fitted values [T]."""

    def __init__(self, columns: Floats, values: Floats) -> None:
        self._columns, self.values = columns, values
        self._solver = np.linalg.pinv(columns)
        self.coefficients: Floats = self._solver @ values
        self.predictions: Floats = columns @ self.coefficients

    def first_information(self) -> float:
        """The sum of squares of the first column that the other columns do not explain; 0 where they explain all."""
        square = float(self._solver[0] @ self._solver[0])
        return 1 / square if square > 0 else 0.0

    def first_error(self, clusters: Ints) -> tuple[float, float]:
        """The first coefficient's standard error and its degrees of freedom, with `clusters` [T] of related values.

        The error is a jackknife's over the clusters (CR3) [Bell & McCaffrey 2002, Survey Methodology 28]. The degrees
        are those of a sum of squares with the clusters' weights [Satterthwaite 1946, Biometrics 2]: few where a few
        clusters decide the coefficient.
        """
        numbers = np.unique(clusters, return_inverse=True)[1]
        basis, scales, rotation = np.linalg.svd(self._columns, full_matrices=False)
        is_large = scales > _LEAST_FREE * scales.max(initial=0.0)
        basis, first = basis[:, is_large], rotation[is_large, 0] / scales[is_large]
        residual_maker = np.eye(is_large.sum()) - _by_cluster(numbers, basis[:, :, None] * basis[:, None, :])
        scales_of_rest, axes = np.linalg.eigh(residual_maker)
        pulls = _by_cluster(numbers, basis * (self.values - self.predictions)[:, None])
        turned_pulls = np.einsum("gca,gc->ga", axes, pulls) / np.maximum(scales_of_rest, _LEAST_FREE)
        moves = np.einsum("c,gca,ga->g", first, axes, turned_pulls)
        shares = _by_cluster(numbers, self._solver[0] ** 2)
        freedom = float(shares.sum() ** 2 / (shares @ shares)) if shares.any() else 0.0
        return float(np.linalg.norm(moves)), freedom


def _by_cluster(numbers: Ints, values: Floats) -> Floats:
    """Sums over the values of each cluster: [T, ...] -> [G, ...]."""
    sums: Floats = np.zeros((int(numbers.max()) + 1, *values.shape[1:]))
    np.add.at(sums, numbers, values)
    return sums


class LevelEdge(NamedTuple):
    """Tokens [T] of a response on either side of a place at which the level of the deviation may change."""

    deviations: Floats
    """abs(d), nats."""
    kinds: Ints
    """Classes of like probability, from 0."""
    offsets: Ints
    """From the place; before it they are negative."""
    place: int
    """In the context."""
    cluster: str | bytes
    """The prompt or conversation."""


class LevelRatio(NamedTuple):
    """The level of the deviation before the places over that behind them, and whether it is another beyond doubt."""

    times: float
    is_clear: bool


_LEAST_RESPONSES: Final = 8
_LEAST_CLUSTERS: Final = 4
_LEAST_FOLD: Final = 1.5
_CLEAR_ERRORS, _CLEAR_ERRORS_OF_RISE = 3.0, 4.0
"""Where the deviation is larger before the places, and where it is larger behind them, which growth may be, too."""
_NEAREST: Final = 21
"""Tokens on either side among which a change is nearly as large as among all; growth is not."""
_LEAST_NEAREST: Final = 0.65
"""Of the change of the level, in logarithms."""
_MOST_EQUAL: Final = 0.5
"""Share of deviations of 0 on both sides: with more the log's own rounding decides which tokens are 0."""
_LEAST_LEVEL: Final = 0.1
"""Of the root of the usual one: a part whose log-probs are nearly all equal counts as no less."""
_ROUNDS: Final = 8
_LEAST_UNIT: Final = 1e-15
_LEAST_ERROR: Final = 1e-9


def change_at_edges(edges: Sequence[LevelEdge]) -> LevelRatio | None:
    """None of fewer than eight edges.

    What the deviation may gain or lose in proportion to the length of the context is no clear change, nor is what the
    nearest tokens do not show. The error is a jackknife's over the clusters.
    """
    from scipy.stats import norm, t

    if len(edges) < _LEAST_RESPONSES:
        return None
    rows = np.repeat(np.arange(len(edges)), [edge.offsets.size for edge in edges])
    roots = np.sqrt(np.concatenate([edge.deviations for edge in edges]))
    levels = _levels(roots, (np.concatenate([edge.kinds for edge in edges]), rows))
    offsets = np.concatenate([edge.offsets for edge in edges])
    is_before, is_nearest = offsets < 0, np.abs(offsets) <= _NEAREST
    sides = 2 * rows + ~is_before
    fit = LeastSquares(np.ones((len(edges), 1)), _falls(levels, sides))
    fall = float(fit.coefficients[0])
    nearest = _falls(levels[is_nearest], sides[is_nearest])
    numbers: dict[str | bytes, int] = {}
    clusters = np.array([numbers.setdefault(edge.cluster, len(numbers)) for edge in edges])
    error, freedom = fit.first_error(clusters)
    beyond_growth = abs(fall) - float(np.mean([_growth_of_context(edge) for edge in edges]))
    clear_errors = _CLEAR_ERRORS if fall > 0 else _CLEAR_ERRORS_OF_RISE
    is_clear = (
        len(numbers) >= _LEAST_CLUSTERS
        and min(np.mean(roots[part] == 0) for part in (is_before, ~is_before)) <= _MOST_EQUAL
        and nearest.size > 0
        and float(nearest.mean()) * np.sign(fall) >= _LEAST_NEAREST * abs(fall)
        and beyond_growth >= np.log(_LEAST_FOLD)
        and t.sf(beyond_growth / max(error, _LEAST_ERROR), freedom) < norm.sf(clear_errors)
    )
    return LevelRatio(float(np.exp(fall)), bool(is_clear))


def _levels(roots: Floats, groups: Sequence[Ints]) -> Floats:
    """The root of abs(d) in units of that of tokens of like probability in all responses, each response less its own
    level [T]: a text that grows sure is no change, nor is one that is unsure and off throughout. Of the root no few
    tokens decide, and a token whose log-probs are equal is 0.
    """
    levels = roots.copy()
    for _ in range(_ROUNDS):
        for group in groups:
            levels /= np.maximum(np.bincount(group, levels) / np.maximum(np.bincount(group), 1), _LEAST_UNIT)[group]
    return levels


def _falls(levels: Floats, sides: Ints) -> Floats:
    """The log of the level before over that behind the place, of each response with tokens [T] on both sides, which are
    2 i and 2 i + 1.
    """
    counts, sums = np.bincount(sides, minlength=2), np.bincount(sides, levels, 2)
    if counts.size % 2:
        counts, sums = np.append(counts, 0), np.append(sums, 0)
    counts, sums = counts.reshape(-1, 2), sums.reshape(-1, 2)
    has_both = (counts > 0).all(axis=1)
    before, after = 2 * np.log(np.maximum(sums[has_both] / counts[has_both], _LEAST_LEVEL)).T
    return np.asarray(before - after)


def _growth_of_context(edge: LevelEdge) -> float:
    """From the tokens before the place to those behind it, in logarithms."""
    before, after = (edge.place + edge.offsets[part].mean() for part in (edge.offsets < 0, edge.offsets >= 0))
    return float(np.log(after / before))
