"""Bins of position, each one stretch of every sequence, and bins of any label a token carries."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import CurveBin
from mismatch_probe.stats.sequences import Array, Floats, Ints, Mask, Sequences

Labels = npt.NDArray[np.uint8]


def log_ends(longest: int, per_octave: Literal[1, 2] = 2) -> list[int]:
    """Ends of position bins: powers of two, at 2 an octave three times them too, and the longest response."""
    steps = {2**k for k in range(longest.bit_length())}
    if per_octave == 2:
        steps |= {3 * 2**k for k in range(longest.bit_length())}
    return sorted({step for step in steps if step < longest} | {longest})


@dataclass(frozen=True)
class PositionGrid:
    """Every sequence cut at the positions `ends` (rising, the last at least the longest response)."""

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
        """Which sequences have as many tokens as each end [N, K]."""
        return np.asarray(self.sequences.lengths[:, None] >= self.ends)

    def reduce(self, function: np.ufunc, values: Array, empty: float = 0.0) -> Floats:
        """`function` of the token values of each sequence in each bin [N, K]; `empty` where it has no token there."""
        present = self.counts > 0
        firsts = (self.sequences.offsets[:-1, None] + self.starts)[present]
        reduced = np.full(present.shape, empty)
        dtype = np.int64 if values.dtype == np.bool_ else values.dtype
        reduced[present] = function.reduceat(values, firsts, dtype=dtype)
        return reduced

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


def grouped(values: Floats, labels: Labels, num_labels: int) -> Iterable[Floats]:
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
