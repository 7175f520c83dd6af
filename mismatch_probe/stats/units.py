"""Whether entropies and log-probs can be those of a vocabulary, by moments that parts of a log add up."""

import math
from typing import Final

import numpy as np

from mismatch_probe.stats.sequences import Floats

LARGEST_VOCABULARY: Final = 2**20
"""Of any language model, with room to spare."""
_FEWEST_TOKENS: Final = 1000
_DIFFERS: Final = 5.0
"""Standard errors of a mean."""


def moments(terms: Floats) -> Floats:
    """Their number, sum and sum of squares [3], which parts add up."""
    return np.array([terms.size, terms.sum(), terms @ terms])


def most_entropy(vocabulary_size: int | None) -> float:
    """Nats of a distribution over a vocabulary, all tokens alike; where its size is not known of the largest one."""
    return math.log(vocabulary_size or LARGEST_VOCABULARY)


def are_no_samples(surprisal: Floats, vocabulary_size: int | None) -> bool:
    """Whether sampled tokens are less likely than the most even distribution makes them, by `moments` of their -log p,
    whose mean is an entropy in expectation.
    """
    if surprisal[0] < _FEWEST_TOKENS:
        return False
    mean, error = mean_and_error(surprisal)
    return mean - _DIFFERS * error > most_entropy(vocabulary_size)


def mean_and_error(sums: Floats) -> tuple[float, float]:
    """The mean by its `moments`, and its standard error."""
    count, total, squares = sums.tolist()
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean * mean) / count)


def errors_from_0(sums: Floats) -> float:
    """How many standard errors a mean lies from 0, by its `moments`."""
    mean, error = mean_and_error(sums)
    return abs(mean) / error if error > 0 else math.inf
