"""How a deviation changes along the context once the tokens' own uncertainty is taken out."""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.verdict.signatures.disagreement import Disagreement

NUM_BINS = 12
LEAST_TOKENS = 40
GROUPS = 24
ERRORS = 3.0
FAR_BEYOND = 10.0
LEAST_SPAN = np.log(8)
LEAST_STARTS = 8


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

    @property
    def level(self) -> float:
        """Mean level over the places, every stretch counting alike."""
        return float(self.levels.mean())

    def __str__(self) -> str:
        return f"place^{self.slope:.2f} (standard error {self.error:.2f})"


def share_at_start(found: Disagreement) -> float | None:
    """Share of the prompts whose first predicted token deviates far beyond rounding.

    None where the starts were not recorded, or too few of those tokens are uncertain.
    """
    if found.probe is None:
        return None
    first = (found.probe.places == 1) & found.probe.uncertain
    return float(found.probe.beyond(FAR_BEYOND)[first].mean()) if first.sum() >= LEAST_STARTS else None


def profile_along(found: Disagreement) -> Profile | None:
    """The profile of abs(d) over the context; None where the places span less than a factor of 8."""
    places = np.log(found.places)
    if places.max() - places.min() < LEAST_SPAN:
        return None
    edges = np.linspace(places.min(), places.max() + 1e-9, NUM_BINS + 1)
    bins = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, NUM_BINS - 1)
    count = np.bincount(bins, minlength=NUM_BINS)
    kept = count >= LEAST_TOKENS
    if kept.sum() < 3:
        return None
    sequences = found.pair.sequences
    cells = sequences.spread(sequences.cluster_index % GROUPS) * NUM_BINS + bins
    size, expected = (_sums(cells, values)[:, kept] for values in (found.pair.abs_diff, found.sensitivity))
    centers = np.bincount(bins, weights=places, minlength=NUM_BINS)[kept] / count[kept]
    levels = size.sum(axis=0) / expected.sum(axis=0)
    without = np.array(
        [
            _slope(centers, (size.sum(axis=0) - one) / (expected.sum(axis=0) - other))
            for one, other in zip(size, expected, strict=True)
            if other.any()
        ]
    )
    error = float(np.sqrt((without.size - 1) / without.size * np.square(without - without.mean()).sum()))
    return Profile(np.exp(centers), levels, _slope(centers, levels), error)


def _sums(cells: Ints, values: Floats) -> Floats:
    """Sums of token values in each group and bin [G, NUM_BINS]."""
    sums = np.bincount(cells, weights=values, minlength=GROUPS * NUM_BINS)
    return sums.astype(np.float64).reshape(GROUPS, NUM_BINS)


def _slope(centers: Floats, levels: Floats) -> float:
    """Of log level against log place, every stretch of the context counting alike."""
    centred = centers - centers.mean()
    return float(centred @ np.log(np.maximum(levels, np.finfo(np.float64).tiny)) / (centred @ centred))
