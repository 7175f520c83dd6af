"""How a deviation changes along the response once the tokens' own sensitivity is taken out."""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.verdict.signatures.disagreement import Disagreement

NUM_BINS = 12
LEAST_TOKENS = 40
GROUPS = 24
LEAST_SENSITIVITY = 0.03


@dataclass(frozen=True)
class Profile:
    """Level of abs(d) over what the token's uncertainty alone would make of it, in bins of place.

    centers [K]: geometric mean place of each bin. slope: of log level against log place; error: its standard error.
    """

    centers: Floats
    levels: Floats
    slope: float
    error: float

    @property
    def tail_over_head(self) -> float:
        """Level of the last third of the bins over that of the first third."""
        third = max(1, self.levels.size // 3)
        return float(self.levels[-third:].mean() / max(self.levels[:third].mean(), np.finfo(np.float64).tiny))


def profile_along(found: Disagreement, values: Floats) -> Profile | None:
    """The profile of token values [T] (nats); None for responses too short to have one."""
    places = np.log(found.places)
    edges = np.linspace(places.min(), places.max() + 1e-9, NUM_BINS + 1)
    bins = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, NUM_BINS - 1)
    count = np.bincount(bins, minlength=NUM_BINS)
    kept = count >= LEAST_TOKENS
    if kept.sum() < 3:
        return None
    centers = (np.bincount(bins, weights=places, minlength=NUM_BINS)[kept]) / count[kept]
    size = _by_group(found, bins, np.abs(values))[:, kept]
    expected = _by_group(found, bins, sensitivity(found))[:, kept]
    levels = size.sum(axis=0) / expected.sum(axis=0)
    slope = _slope(centers, levels, count[kept])
    without = [
        _slope(centers, (size.sum(axis=0) - one) / (expected.sum(axis=0) - other), count[kept])
        for one, other in zip(size, expected, strict=True)
    ]
    groups = len(without)
    error = float(np.sqrt((groups - 1) / groups * np.sum((np.array(without) - np.mean(without)) ** 2)))
    return Profile(np.exp(centers), levels, slope, error)


def sensitivity(found: Disagreement) -> Floats:
    """Standard deviation of d for independent unit errors in every logit [T].

    log p_a moves by e_a - sum_b p_b e_b, whose variance is 1 - 2 p_a + sum_b p_b^2; the last sum is at least exp(-H).
    """
    probability = found.pair.prob_mu
    entropy = found.pair.entropy_pi
    collision = probability**2 if entropy is None else np.exp(-entropy.astype(np.float64))
    return np.asarray(np.sqrt(np.maximum(1 - 2 * probability + collision, LEAST_SENSITIVITY**2)), dtype=np.float64)


def _by_group(found: Disagreement, bins: Ints, values: Floats) -> Floats:
    """Sums of token values of each group of prompts and bin [G, NUM_BINS]; groups are what the error leaves out."""
    sequences = found.pair.sequences
    groups = min(GROUPS, sequences.num_clusters)
    cell = sequences.spread(sequences.cluster_index % groups) * NUM_BINS + bins
    sums = np.bincount(cell, weights=values, minlength=groups * NUM_BINS)
    return sums.astype(np.float64).reshape(groups, NUM_BINS)


def _slope(centers: Floats, levels: Floats, weights: Ints) -> float:
    share = weights / weights.sum()
    centred = centers - share @ centers
    logs = np.log(np.maximum(levels, np.finfo(np.float64).tiny))
    return float((share * centred) @ logs / ((share * centred) @ centred))
