"""Exact zeros of a log-prob: what a sampler says of a token that it is sure of, or what stands for no number.

A sampler is sure where a token is alone in its nucleus (top-p) or where a log-softmax in 16 bits rounds there. The
other side then is nearly sure of the token too. Zeros for what was not recorded fill a response or a stretch of it,
whatever the other side says of its tokens.
"""

from typing import Final

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints, Mask, Reals, is_usable

SURELY_BELOW_ZERO: Final = -1.0
"""A token that one side gives less is certain on no side: not by rounding, nor alone in a nucleus of 0.4 or more."""
FEWEST_REFUTED: Final = 3
REFUTED_SHARE: Final = 0.005
"""Of zeros: a model that is very sure gives so many of its tokens less than e^-1."""
SHORTEST_RUN: Final = 16
"""Zeros next to each other that are judged by themselves."""


def refuted(zeros: Mask, others: Reals) -> Mask:
    """Zeros [T] of tokens that the other side is not sure of."""
    return np.asarray(zeros & is_usable(others) & (others < SURELY_BELOW_ZERO))


def are_refuted(num_refuted: int, num_compared: int, *, throughout: bool = False) -> bool:
    """Whether zeros stand for no numbers, by how many of those that have another side it refutes: 3 or more, or one
    where nothing but zeros is there (`throughout`), and 1 in 200 or more.
    """
    return num_refuted >= max(1 if throughout else FEWEST_REFUTED, REFUTED_SHARE * num_compared)


def filled_with_zeros(values: Reals, others: Reals) -> Mask:
    """Of a response the zeros that stand for no numbers [T]: those of a run of 16 or more, or the others together,
    where the other side refutes 3 or more.
    """
    zeros = np.asarray(values == 0)
    doubtful = refuted(zeros, others)
    filled: Mask = np.zeros(zeros.shape, dtype=np.bool_)
    if doubtful.sum() < FEWEST_REFUTED:
        return filled
    run_of = _runs(zeros)
    sizes = np.bincount(run_of)
    run_of = np.where(sizes[run_of] >= SHORTEST_RUN, run_of, 0)
    for run in np.unique(run_of[doubtful]):
        of_run = zeros & (run_of == run)
        if are_refuted(int(doubtful[of_run].sum()), int(is_usable(others[of_run]).sum())):
            filled |= of_run
    return filled


def zeros_for_missing(values: Reals, others: Reals, offsets: Ints) -> Mask:
    """The zeros of several responses that stand for no numbers [T]: those that fill responses, and all others where the
    other side refutes these too.

    offsets: [N+1], as of `Sequences`.
    """
    zeros = np.asarray(values == 0)
    doubtful = refuted(zeros, others)
    filled: Mask = np.zeros(zeros.shape, dtype=np.bool_)
    if not doubtful.any():
        return filled
    if zeros.all():
        is_absent = are_refuted(int(doubtful.sum()), int(is_usable(others).sum()), throughout=True)
        return zeros if is_absent else filled
    counts = np.add.reduceat(doubtful, offsets[:-1], dtype=np.int64)
    for row in np.flatnonzero(counts >= FEWEST_REFUTED):
        of_row = slice(offsets[row], offsets[row + 1])
        filled[of_row] = filled_with_zeros(values[of_row], others[of_row])
    rest = zeros & ~filled
    if are_refuted(int(doubtful[rest].sum()), int(is_usable(others[rest]).sum())):
        return zeros
    return filled


def sides_without_zeros(first: Floats, second: Floats, offsets: Ints) -> tuple[Floats, Floats]:
    """Two sides [T] with NaN for the zeros of each that the other one takes for no numbers (`zeros_for_missing`)."""
    sides = (first, second), (second, first)
    of_first, of_second = (
        np.where(absent, np.nan, values) if (absent := zeros_for_missing(values, others, offsets)).any() else values
        for values, others in sides
    )
    return of_first, of_second


def _runs(zeros: Mask) -> Ints:
    """The number of each zero's run, from 1 [T]; 0 where there is none."""
    begins = zeros & ~np.concatenate([[False], zeros[:-1]])
    return np.asarray(np.where(zeros, np.cumsum(begins), 0), dtype=np.int64)
