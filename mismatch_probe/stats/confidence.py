"""Deviation inside bins of confidence: what is left of the growth with length when the tokens are equally hard."""

from itertools import pairwise
from typing import Literal

import numpy as np

from mismatch_probe.stats.bins import Labels, PositionGrid, curve, grouped, log_ends, sums_by_label
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import ConfidenceBin, ConfidenceCurve
from mismatch_probe.stats.sequences import Floats, Reals, TokenPair, difference, probability

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
FINE_PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 100.0)


def confidence_curves(pair: TokenPair, estimator: Estimator) -> list[ConfidenceCurve]:
    """abs(d) by position inside bins of the token's reference probability (mu's without a reference) and of entropy."""
    grid = PositionGrid(pair.sequences, np.array(log_ends(int(pair.sequences.lengths.max()), per_octave=1)))
    positions = grid.labels()
    by: Literal["reference_probability", "inference_probability"]
    by = "inference_probability" if pair.log_ref is None else "reference_probability"
    curves = _curves_by(by, _probability(pair), PROBABILITY_EDGES, pair, estimator, grid, positions)
    if pair.entropy_pi is not None:
        curves += _curves_by("entropy_nats", pair.entropy_pi, ENTROPY_EDGES, pair, estimator, grid, positions)
    return curves


def confidence_bins(pair: TokenPair, level: float = 0.95) -> list[ConfidenceBin]:
    """abs(d), and the rms error of each side against the reference, by the token's probability under the reference.

    Without a reference the bins are of mu's probability and the errors are None. Empty bins are left out.
    """
    estimator = Estimator(pair.sequences, level)
    edges = FINE_PROBABILITY_EDGES
    labels = _label(_probability(pair), edges)
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


def _probability(pair: TokenPair) -> Floats:
    return pair.prob_mu if pair.log_ref is None else probability(pair.log_ref)


def _label(values: Reals, edges: tuple[float, ...]) -> Labels:
    """The bin [low, high) of each value; the last bin takes what lies above."""
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
    cells = _label(values, edges) * np.uint8(num_positions) + positions
    num_cells = num_bins * num_positions
    sums = sums_by_label(pair.sequences, cells, num_cells, pair.abs_diff)
    counts = sums_by_label(pair.sequences, cells, num_cells)
    groups = list(grouped(pair.abs_diff, cells, num_cells))
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
