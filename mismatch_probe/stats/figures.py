"""The data of the report's figures: small, whatever the number of tokens."""

from typing import Literal

import numpy as np

from mismatch_probe.stats.results import ErrorHistogram, ProbabilityScatter, WorstToken
from mismatch_probe.stats.sequences import Floats, Reals, TokenPair, difference

ERROR_EDGES_LOG10 = [round(-12 + 0.25 * step, 2) for step in range(57)]


def probability_scatter(pair: TokenPair, num_bins: int = 64) -> ProbabilityScatter:
    """Counts of tokens by their probability under mu (x) and pi (y); bins of equal width over [0, 1]."""
    x, y = (_bin(probability, num_bins) for probability in (pair.prob_mu, pair.prob_pi))
    counts = np.bincount(x * num_bins + y, minlength=num_bins**2)
    filled = np.flatnonzero(counts)
    cells = [(int(cell // num_bins), int(cell % num_bins), int(counts[cell])) for cell in filled]
    return ProbabilityScatter(num_bins, cells)


def _bin(probability: Floats, num_bins: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
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
        seen = error[error > 0]
        low, high, count = ERROR_EDGES_LOG10[0], ERROR_EDGES_LOG10[-1], len(ERROR_EDGES_LOG10) - 1
        bins = np.clip((np.log10(seen) - low) * (count / (high - low)), 0, count - 1).astype(np.int32)
        counts = np.bincount(bins, minlength=count)
        histograms.append(ErrorHistogram(side, ERROR_EDGES_LOG10, counts.tolist(), int(error.size - seen.size)))
    return histograms


def worst_tokens(pair: TokenPair, count: int) -> list[WorstToken]:
    """The `count` tokens of largest abs(d), largest first; equal ones in the order of the rows."""
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
