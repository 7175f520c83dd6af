"""Which whole responses deviate most: by their importance weight, by their mean deviation, by their worst token."""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.sequences import Array, TokenPair


@dataclass(frozen=True)
class WorstResponse:
    """One response and how far its two sides are apart, in nats.

    log_weight: S, the sum of d; exp(S) is the response's importance weight. worst: position of its largest abs(d).
    """

    row: int
    worst: int
    num_tokens: int
    log_weight: float
    mean_abs_diff: float
    largest_abs_diff: float
    kl_k3: float


def worst_responses(pair: TokenPair, count: int) -> list[WorstResponse]:
    """Up to `count` responses, by turns the next largest by abs(S), by mean abs(d) and by a single token's abs(d); in
    the order of abs(S).
    """
    sequences = pair.sequences
    means = sequences.sum_by_sequence(pair.abs_diff) / sequences.lengths
    largest = np.maximum.reduceat(pair.abs_diff, sequences.offsets[:-1])
    weights = np.abs(pair.diff_sums)
    orders = [_largest_first(values, count) for values in (weights, means, largest)]
    rows = list(dict.fromkeys(row for turn in zip(*orders, strict=True) for row in turn))[:count]
    return [
        _response(pair, row, float(means[row]), float(largest[row]))
        for row in sorted(rows, key=lambda row: (-weights[row], row))
    ]


def _largest_first(values: Array, count: int) -> list[int]:
    return [int(row) for row in np.argsort(-values, kind="stable")[:count]]


def _response(pair: TokenPair, row: int, mean: float, largest: float) -> WorstResponse:
    start, end = pair.sequences.offsets[row : row + 2]
    return WorstResponse(
        row=row,
        worst=int(pair.abs_diff[start:end].argmax()),
        num_tokens=int(end - start),
        log_weight=float(pair.diff_sums[row]),
        mean_abs_diff=mean,
        largest_abs_diff=largest,
        kl_k3=float(k3_terms(pair.diff[start:end]).mean()),
    )
