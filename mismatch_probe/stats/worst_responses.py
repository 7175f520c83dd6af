"""The tokens and responses with the largest deviations, and the data of the report's small figures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import ErrorHistogram, FewTokens, ProbabilityScatter, WorstToken
from mismatch_probe.stats.sequences import Floats, Ints, Reals, TokenPair, difference


@dataclass(frozen=True)
class WorstResponse:
    """One response and the deviation between its two sides, in nats."""

    row: int
    worst: int
    """The position of the largest abs(d)."""
    num_tokens: int
    log_weight: float
    """S, the sum of d; exp(S) is the response's importance weight."""
    mean_abs_diff: float
    largest_abs_diff: float
    kl_k3: float


def worst_responses(pair: TokenPair, count: int) -> list[WorstResponse]:
    """Up to `count` responses, in the order of abs(S).

    They are taken in turn from the largest by abs(S), by mean abs(d) and by the abs(d) of a single token.
    """
    sequences = pair.sequences
    means = sequences.sum_by_sequence(pair.abs_diff) / sequences.lengths
    largest = np.maximum.reduceat(pair.abs_diff, sequences.offsets[:-1])
    weights = np.abs(pair.diff_sums)
    orders = [np.argsort(-values, kind="stable")[:count].tolist() for values in (weights, means, largest)]
    rows = list(dict.fromkeys(row for turn in zip(*orders, strict=True) for row in turn))[:count]
    return [
        _worst_response(pair, row, float(means[row]), float(largest[row]))
        for row in sorted(rows, key=lambda row: (-weights[row], row))
    ]


def _worst_response(pair: TokenPair, row: int, mean: float, largest: float) -> WorstResponse:
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


HALF: Final = 0.5
FEW: Final = 5
FEW_SHARE: Final = 2e-3
_ONE_OF: Final = 100
"""The few are at most one token in so many. Without a fault in BF16, half takes one in fifty or more, often one in ten.
"""
_ALIKE: Final = 0.5
"""A token that has at least this share of the smallest of the few is one of them."""


def few_tokens(pair: TokenPair, place: Callable[[int, int], tuple[str, int]]) -> FewTokens | None:
    """The tokens that have more than half of the sum of k3, where these are at most 5, or 1 in 500.

    It is None elsewhere, and for fewer than 100 tokens. place: from a row of the pair and a position in it to the name
    of the response and the position there.
    """
    terms = k3_terms(pair.diff)
    total = float(terms.sum())
    most = int(max(min(FEW, terms.size / _ONE_OF), FEW_SHARE * terms.size))
    if most < 1 or not 0 < total < np.inf:
        return None
    few = _fewest_that_hold_half(terms, total, most)
    if few is None:
        return None
    largest = int(few[0])
    row = int(np.searchsorted(pair.sequences.offsets, largest, side="right")) - 1
    response, position = place(row, largest - int(pair.sequences.offsets[row]))
    return FewTokens(
        num_tokens=few.size,
        of_tokens=terms.size,
        share_of_kl=float(terms[few].sum()) / total,
        zeros_pi=int((pair.log_pi[few] == 0).sum()),
        zeros_mu=int((pair.log_mu[few] == 0).sum()),
        response=response,
        position=position,
        log_pi=float(pair.log_pi[largest]),
        log_mu=float(pair.log_mu[largest]),
    )


def _fewest_that_hold_half(terms: np.ndarray, total: float, most: int) -> Ints | None:
    """Indices of the largest terms, which have half of the total, and of similar terms, largest first; None where these
    are more than `most`.
    """
    largest = np.argpartition(-terms, min(most, terms.size - 1))[: most + 1]
    order = largest[np.argsort(-terms[largest], kind="stable")][:most]
    cumulative = np.cumsum(terms[order])
    if cumulative[-1] <= HALF * total:
        return None
    num_for_half = int(np.searchsorted(cumulative, HALF * total, side="right")) + 1
    alike = int((terms[order] >= _ALIKE * terms[order[num_for_half - 1]]).sum())
    return np.asarray(order[: max(num_for_half, alike)])


ERROR_EDGES_LOG10 = [round(-12 + 0.25 * step, 2) for step in range(57)]


def probability_scatter(pair: TokenPair, num_bins: int = 64) -> ProbabilityScatter:
    """Counts of tokens by their probability under mu (x) and pi (y); bins of equal width over [0, 1]."""
    x, y = (_probability_bin(probability, num_bins) for probability in (pair.prob_mu, pair.prob_pi))
    counts = np.bincount(x * num_bins + y, minlength=num_bins**2)
    nonzero = np.flatnonzero(counts)
    cells = [(int(cell // num_bins), int(cell % num_bins), int(counts[cell])) for cell in nonzero]
    return ProbabilityScatter(num_bins, cells)


def _probability_bin(probability: Floats, num_bins: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.clip(probability * num_bins, 0, num_bins - 1).astype(np.int32)


def error_histograms(pair: TokenPair) -> list[ErrorHistogram]:
    """log10 of each side's abs error (nats) against the reference; none without one.

    Errors below 1e-12 count in the first bin and above 100 in the last; exact agreement is `zeros`.
    """
    if pair.log_ref is None:
        return []
    histograms = []
    sides: dict[Literal["pi", "mu"], Reals] = {"pi": pair.log_pi, "mu": pair.log_mu}
    for side, leg in sides.items():
        error = np.abs(difference(leg, pair.log_ref))
        nonzero = error[error > 0]
        low, high, count = ERROR_EDGES_LOG10[0], ERROR_EDGES_LOG10[-1], len(ERROR_EDGES_LOG10) - 1
        bins = np.clip((np.log10(nonzero) - low) * (count / (high - low)), 0, count - 1).astype(np.int32)
        counts = np.bincount(bins, minlength=count)
        histograms.append(ErrorHistogram(side, ERROR_EDGES_LOG10, counts.tolist(), int(error.size - nonzero.size)))
    return histograms


def worst_tokens(pair: TokenPair, count: int) -> list[WorstToken]:
    """The `count` tokens of the largest abs(d), largest first; equal ones are in the order of the rows."""
    count = min(count, pair.sequences.num_tokens)
    candidates = np.argpartition(-pair.abs_diff, count - 1)[:count] if count else np.array([], dtype=np.int64)
    order = candidates[np.lexsort((candidates, -pair.abs_diff[candidates]))]
    rows = np.searchsorted(pair.sequences.offsets, order, side="right") - 1
    return [
        WorstToken(
            row=int(row),
            position=int(token - pair.sequences.offsets[row]),
            log_pi=float(pair.log_pi[token]),
            log_mu=float(pair.log_mu[token]),
            log_ref=None if pair.log_ref is None else float(pair.log_ref[token]),
        )
        for row, token in zip(rows, order, strict=True)
    ]
