"""Bins of position and of any label a token carries, places that stand out, and deviations in bins of confidence."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import LEVEL, ConfidenceBin, ConfidenceCurve, CurveBin
from mismatch_probe.stats.sequences import (
    Array,
    Floats,
    Ints,
    Mask,
    Reals,
    Sequences,
    TokenPair,
    difference,
    probability,
)

Labels = npt.NDArray[np.uint8]


def log_ends(longest: int, per_octave: Literal[1, 2] = 2) -> list[int]:
    """Ends of position bins: the powers of two, with 2 an octave also 3 times these, and the longest response."""
    steps = {2**k for k in range(longest.bit_length())}
    if per_octave == 2:
        steps |= {3 * 2**k for k in range(longest.bit_length())}
    return sorted({step for step in steps if step < longest} | {longest})


@dataclass(frozen=True)
class PositionGrid:
    """Sequences cut at the positions `ends`, which rise; the last is at least the longest response."""

    sequences: Sequences
    ends: Ints

    @cached_property
    def starts(self) -> Ints:
        return np.concatenate([[0], self.ends[:-1]])

    @property
    def bounds(self) -> list[tuple[float, float, float]]:
        """Low, high and center of each bin; the center is the geometric mean of its first and last token, from 1."""
        return [
            (float(low), float(high), math.sqrt((low + 1) * high))
            for low, high in zip(self.starts, self.ends, strict=True)
        ]

    @cached_property
    def counts(self) -> Floats:
        """Tokens of each sequence in each bin [N, K]."""
        return np.clip(self.sequences.lengths[:, None] - self.starts, 0, self.ends - self.starts).astype(np.float64)

    @cached_property
    def reached(self) -> Mask:
        """The mask of the sequences that have as many tokens as each end [N, K]."""
        return np.asarray(self.sequences.lengths[:, None] >= self.ends)

    def reduce(self, function: np.ufunc, values: Array, empty: float = 0.0) -> Floats:
        """`function` of the token values of each sequence in each bin [N, K]; `empty` where it has no token there."""
        present = self.counts > 0
        firsts = (self.sequences.offsets[:-1, None] + self.starts)[present]
        result = np.full(present.shape, empty)
        dtype = np.int64 if values.dtype == np.bool_ else values.dtype
        result[present] = function.reduceat(values, firsts, dtype=dtype)
        return result

    def sums(self, values: Array) -> Floats:
        return self.reduce(np.add, values)

    def labels(self) -> Labels:
        """The bin of each token [T]."""
        bin_of_position = np.repeat(np.arange(self.ends.size, dtype=np.uint8), np.diff(self.ends, prepend=0))
        return bin_of_position[self.sequences.positions]


def sums_by_label(sequences: Sequences, labels: Labels, num_labels: int, values: Floats | None = None) -> Floats:
    """Sum of token values, or number of tokens, of each sequence and label [N, num_labels]."""
    cell = np.repeat(np.arange(sequences.num_sequences) * num_labels, sequences.lengths)
    cell += labels
    totals = np.bincount(cell, weights=values, minlength=sequences.num_sequences * num_labels)
    return totals.reshape(sequences.num_sequences, num_labels).astype(np.float64, copy=False)


def group_by_label(values: Floats, labels: Labels, num_labels: int) -> Iterable[Floats]:
    """The values of each label, in turn."""
    order = np.argsort(labels, kind="stable")
    cuts = np.cumsum(np.bincount(labels, minlength=num_labels))[:-1]
    return np.split(values[order], cuts)


def curve(
    estimator: Estimator,
    bounds: Iterable[tuple[float, float, float]],
    groups: Iterable[Floats],
    sums: Floats,
    counts: Floats,
) -> list[CurveBin]:
    """A bin for each (low, high, center) that holds a token: token means from per-sequence sums and counts [N, K]."""
    bins = []
    for (low, high, center), values, total, count in zip(bounds, groups, sums.T, counts.T, strict=True):
        if values.size:
            present = count > 0
            mean = estimator.of_part(present, count[present]).mean_of_sums(total[present], Scale.POSITIVE)
            if mean is not None:
                bins.append(CurveBin(low, high, center, mean, *quantiles_of_bin(values)))
    return bins


def quantiles_of_bin(values: Floats) -> tuple[float, float, float]:
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return float(p50), float(p90), float(p99)


PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
FINE_PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 100.0)


def confidence_curves(pair: TokenPair, estimator: Estimator) -> list[ConfidenceCurve]:
    """abs(d) by position inside bins of the token's reference probability (mu's without a reference) and of entropy."""
    grid = PositionGrid(pair.sequences, np.array(log_ends(int(pair.sequences.lengths.max()), per_octave=1)))
    positions = grid.labels()
    by: Literal["reference_probability", "inference_probability"]
    by = "inference_probability" if pair.log_ref is None else "reference_probability"
    curves = _curves_by(by, _reference_probability(pair), PROBABILITY_EDGES, pair, estimator, grid, positions)
    if pair.entropy_pi is not None:
        curves += _curves_by("entropy_nats", pair.entropy_pi, ENTROPY_EDGES, pair, estimator, grid, positions)
    return curves


def confidence_bins(pair: TokenPair, level: float = LEVEL) -> list[ConfidenceBin]:
    """abs(d), and the rms error of each side against the reference, by the token's probability under the reference.

    Without a reference the bins are of mu's probability and the errors are None. Empty bins are left out.
    """
    estimator = Estimator(pair.sequences, level)
    edges = FINE_PROBABILITY_EDGES
    labels = _bin_of_value(_reference_probability(pair), edges)
    num_bins = len(edges) - 1
    counts = sums_by_label(pair.sequences, labels, num_bins)
    deviations = sums_by_label(pair.sequences, labels, num_bins, pair.abs_diff)
    errors = [_rms_by_label(leg, pair.log_ref, labels, num_bins) for leg in (pair.log_pi, pair.log_mu)]
    bins = []
    for number, (low, high) in enumerate(pairwise(edges)):
        present = counts[:, number] > 0
        if present.any():
            part = estimator.of_part(present, counts[present, number])
            mean = part.mean_of_sums(deviations[present, number], Scale.POSITIVE)
            rms_pi, rms_mu = (None if error is None else float(error[number]) for error in errors)
            if mean is not None:
                bins.append(ConfidenceBin(low, high, mean.num_tokens, mean, rms_pi, rms_mu))
    return bins


def _reference_probability(pair: TokenPair) -> Floats:
    return pair.prob_mu if pair.log_ref is None else probability(pair.log_ref)


def _bin_of_value(values: Reals, edges: tuple[float, ...]) -> Labels:
    """The bin [low, high) of each value; the last bin contains all larger values."""
    labels = np.zeros(values.size, dtype=np.uint8)
    for edge in edges[1:-1]:
        labels += values >= edge
    return labels


def _curves_by(
    by: Literal["reference_probability", "inference_probability", "entropy_nats"],
    values: Reals,
    edges: tuple[float, ...],
    pair: TokenPair,
    estimator: Estimator,
    grid: PositionGrid,
    positions: Labels,
) -> list[ConfidenceCurve]:
    num_positions, num_bins = grid.ends.size, len(edges) - 1
    cells = _bin_of_value(values, edges) * np.uint8(num_positions) + positions
    num_cells = num_bins * num_positions
    sums = sums_by_label(pair.sequences, cells, num_cells, pair.abs_diff)
    counts = sums_by_label(pair.sequences, cells, num_cells)
    groups = list(group_by_label(pair.abs_diff, cells, num_cells))
    curves = []
    for number, (low, high) in enumerate(pairwise(edges)):
        own = slice(number * num_positions, (number + 1) * num_positions)
        bins = curve(estimator, grid.bounds, groups[own], sums[:, own], counts[:, own])
        if bins:
            curves.append(ConfidenceCurve(by, low, high, bins))
    return curves


def _rms_by_label(leg: Reals, reference: Reals | None, labels: Labels, num_bins: int) -> Floats | None:
    """Root of the mean squared error of the tokens of each label; NaN for a label without tokens."""
    if reference is None:
        return None
    squares = np.bincount(labels, weights=difference(leg, reference) ** 2, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(squares / np.bincount(labels, minlength=num_bins)))


def outstanding_phase(sizes: Floats, places: Ints, blocks: Sequence[int], least: int) -> tuple[float, int, int]:
    """By how many standard errors the sizes at the phase that stands out most lie above the others, its block and it;
    of phases with at least so many tokens.
    """
    best = (0.0, 1, 1)
    for block in blocks:
        counts = np.bincount(places % block, minlength=block)
        means = np.bincount(places % block, sizes, minlength=block) / np.maximum(counts, 1)
        errors = max(sizes.std(), 1e-12) / np.sqrt(np.maximum(counts, 1))
        scores = np.where(counts >= least, (means - sizes.mean()) / errors, 0)
        best = max(best, (float(scores.max()), block, int(scores.argmax())))
    return best


def score_of_rest(sizes: Floats, numbers: Ints, is_at: Mask) -> float:
    """The same of these tokens without those of the block, by number, that shows it most; 0 where none remains."""
    rest = is_at & (numbers != np.bincount(numbers[is_at], sizes[is_at]).argmax())
    others = sizes[~is_at]
    return float((sizes[rest].mean() - others.mean()) / others.std() * np.sqrt(rest.sum())) if rest.any() else 0.0


_MOST_PLACES: Final = 2048


def outstanding_place(sizes: Floats, places: Ints, rows: Ints) -> tuple[int, float]:
    """The place from which on sizes of the same responses rise most surely, and by how many standard errors."""
    candidates = np.unique(places)[1:]
    if not candidates.size:
        return 0, 0.0
    if candidates.size > _MOST_PLACES:
        candidates = candidates[np.linspace(0, candidates.size - 1, _MOST_PLACES).astype(np.int64)]
    pulls, weights = np.zeros(candidates.size), np.zeros(candidates.size)
    ends = np.flatnonzero(np.diff(rows, append=rows[-1] + 1)) + 1
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        before = np.searchsorted(places[start:end], candidates)
        sums = np.concatenate([[0.0], np.cumsum(sizes[start:end])])
        after = end - start - before
        weight = before * after / (end - start)
        has_both = weight > 0
        rise = (sums[-1] - sums[before]) / np.maximum(after, 1) - sums[before] / np.maximum(before, 1)
        pulls += np.where(has_both, rise * weight, 0)
        weights += weight
    spread = float(np.std(less_mean_of_row(sizes, rows)))
    scores = pulls / np.sqrt(np.maximum(weights, 1e-12)) / max(spread, 1e-12)
    best = int(scores.argmax())
    return int(candidates[best]), float(scores[best])


def less_mean_of_row(sizes: Floats, rows: Ints) -> Floats:
    """Less the mean of the row."""
    return np.asarray(sizes - (np.bincount(rows, sizes) / np.maximum(np.bincount(rows), 1))[rows])


def rises_of_rows(sizes: Floats, is_behind: Mask, rows: Ints) -> tuple[Floats, Floats]:
    """By how much the sizes of each row rise, and the weight of that."""
    parts = [(rows[of], sizes[of]) for of in (is_behind, ~is_behind)]
    counts = [np.bincount(own, minlength=rows.max() + 1) for own, _ in parts]
    means = [
        np.bincount(own, values, rows.max() + 1) / np.maximum(count, 1)
        for (own, values), count in zip(parts, counts, strict=True)
    ]
    weights = counts[0] * counts[1] / np.maximum(counts[0] + counts[1], 1)
    return np.where(weights > 0, means[0] - means[1], 0.0), weights
