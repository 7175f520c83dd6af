"""How a deviation changes along the context once the tokens' own uncertainty is taken out."""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.verdict.signatures.disagreement import Disagreement

NUM_BINS = 12
LEAST_TOKENS = 24
LEAST_BINS = 4
GROUPS = 24
ERRORS = 3.0
LEAST_SPAN = np.log(8)


@dataclass(frozen=True)
class Profile:
    """Level of abs(d) over what the token's uncertainty alone would make of it, in bins of place.

    centers [K]: geometric mean place of each bin. slope: of log level against log place; error: its standard error.
    """

    centers: Floats
    levels: Floats
    slope: float
    error: float

    def surely_above(self, slope: float) -> bool:
        return self.slope - ERRORS * self.error > slope

    def surely_below(self, slope: float) -> bool:
        return self.slope + ERRORS * self.error < slope

    def __str__(self) -> str:
        return f"place^{self.slope:.2f} (standard error {self.error:.2f})"


def profile_along(disagreement: Disagreement, from_place: int = 1) -> Profile | None:
    """The profile of abs(d) from a place of the context on; None for one prompt, or places that span less than a factor
    of 8.

    Levels are geometric means, so that flips between experts and rare tokens do not make the profile.
    """
    chosen = disagreement.uncertain & (disagreement.places >= from_place)
    if not chosen.any():
        return None
    places = np.log(disagreement.places[chosen])
    if places.max() - places.min() < LEAST_SPAN:
        return None
    edges = np.linspace(places.min(), places.max() + 1e-9, NUM_BINS + 1)
    bins = _joined(np.clip(np.searchsorted(edges, places, side="right") - 1, 0, NUM_BINS - 1))
    kept = np.arange(NUM_BINS) <= bins.max()
    sequences = disagreement.pair.sequences
    if kept.sum() < LEAST_BINS or sequences.num_clusters < 2:
        return None
    cells = sequences.spread(sequences.cluster_index % GROUPS)[chosen] * NUM_BINS + bins
    sizes = np.log(disagreement.logit_errors[chosen])
    count, size, place = (_sums(cells, values)[:, kept] for values in (np.ones_like(places), sizes, places))
    centers, levels = place.sum(axis=0) / count.sum(axis=0), size.sum(axis=0) / count.sum(axis=0)
    rest = count.sum(axis=0) - count
    full = (rest > 0).all(axis=1) & (count > 0).any(axis=1)
    without = np.array(
        [_slope(centers, others_size) for others_size in ((size.sum(axis=0) - size) / np.maximum(rest, 1))[full]]
    )
    error = float(np.sqrt((without.size - 1) / without.size * np.square(without - without.mean()).sum()))
    return Profile(np.exp(centers), np.exp(levels), _slope(centers, levels), error)


def _joined(bins: Ints) -> Ints:
    """Bins with too few tokens go into the next one, the last into the one before: few prompts have few tokens at the
    first places, where other text weighs most.
    """
    joined, number, tokens = np.zeros(NUM_BINS, dtype=np.int64), 0, 0
    for one, count in enumerate(np.bincount(bins, minlength=NUM_BINS)):
        joined[one] = number
        tokens += int(count)
        if tokens >= LEAST_TOKENS:
            number, tokens = number + 1, 0
    joined[joined == number] = max(number - 1, 0)
    return np.asarray(joined[bins])


def _sums(cells: Ints, values: Floats) -> Floats:
    """Sums of token values in each group and bin [G, NUM_BINS]."""
    sums = np.bincount(cells, weights=values, minlength=GROUPS * NUM_BINS)
    return sums.astype(np.float64).reshape(GROUPS, NUM_BINS)


def _slope(centers: Floats, log_levels: Floats) -> float:
    """Of log level against log place, every stretch of the context counting alike."""
    centred = centers - centers.mean()
    return float(centred @ log_levels / (centred @ centred))
