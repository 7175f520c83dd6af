"""How a deviation changes along the response once the tokens' own sensitivity is taken out."""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.verdict.signatures.disagreement import Disagreement

NUM_BINS = 12
LEAST_TOKENS = 40
GROUPS = 24
FAR_BEYOND = 10.0
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
    """The profile of abs(d) over the context, the prompts' starts included; None for responses too short for one."""
    parts = [found] if found.probe is None else [found.probe, found]
    places = np.log(np.concatenate([part.places for part in parts]))
    edges = np.linspace(places.min(), places.max() + 1e-9, NUM_BINS + 1)
    bins = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, NUM_BINS - 1)
    count = np.bincount(bins, minlength=NUM_BINS)
    kept = count >= LEAST_TOKENS
    if kept.sum() < 3:
        return None
    groups = np.concatenate([_groups(part) for part in parts])
    cells = groups * NUM_BINS + bins
    size = _sums(cells, np.concatenate([part.pair.abs_diff for part in parts]))[:, kept]
    expected = _sums(cells, np.concatenate([part.sensitivity for part in parts]))[:, kept]
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


def _groups(part: Disagreement) -> Ints:
    """The group of prompts of each token; groups are what the error leaves out in turn [T]."""
    return part.pair.sequences.spread(part.pair.sequences.cluster_index % GROUPS)


def _sums(cells: Ints, values: Floats) -> Floats:
    """Sums of token values in each group and bin [G, NUM_BINS]."""
    sums = np.bincount(cells, weights=values, minlength=GROUPS * NUM_BINS)
    return sums.astype(np.float64).reshape(GROUPS, NUM_BINS)


def _slope(centers: Floats, levels: Floats) -> float:
    """Of log level against log place, every stretch of the context counting alike."""
    centred = centers - centers.mean()
    return float(centred @ np.log(np.maximum(levels, np.finfo(np.float64).tiny)) / (centred @ centred))
