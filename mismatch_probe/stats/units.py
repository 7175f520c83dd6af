"""Whether entropies and log-probs can be what they are called: in nats, of a vocabulary."""

import math
from typing import Final

import numpy as np

from mismatch_probe.stats.sequences import Floats

LARGEST_VOCABULARY: Final = 2**20
"""Of any language model, with room to spare."""
_TOKENS_FOR_UNITS: Final = 1000
_AGREES: Final = 3.0
_DIFFERS: Final = 5.0
"""Standard errors of a mean."""


def moments(terms: Floats) -> Floats:
    """Their number, sum and sum of squares [3], which parts add up."""
    return np.array([terms.size, terms.sum(), terms @ terms])


def unit_moments(log_probs: Floats, entropy: Floats, unsure_above: float) -> Floats:
    """`moments` [3, 3] of tokens [T]: of log p + H, and with H taken for bits those of unsure tokens and of the others.

    E[-log p] is the entropy for tokens drawn from p, so that the terms are differences of a martingale, which do not
    correlate. unsure_above: entropy.
    """
    is_unsure, in_bits = entropy > unsure_above, log_probs + math.log(2) * entropy
    return np.stack([moments(log_probs + entropy), moments(in_bits[is_unsure]), moments(in_bits[~is_unsure])])


def look_like_bits(sums: Floats) -> bool:
    """Whether entropies are in bits, by sums of `unit_moments`: then -log p is ln 2 times them, for sure and for unsure
    tokens. Tokens drawn at a lower temperature also surprise less, but not by one factor for both.
    """
    nats, *halves = sums
    if nats[0] < _TOKENS_FOR_UNITS:
        return False
    return max(_errors_from_0(half) for half in halves if half[0]) <= _AGREES and _errors_from_0(nats) > _DIFFERS


def are_in_bits(log_probs: Floats, entropy: Floats) -> bool:
    """Whether entropies [T] of tokens with these log-probs [T] look like bits (`look_like_bits`)."""
    return bool(entropy.size) and look_like_bits(unit_moments(log_probs, entropy, float(np.median(entropy))))


def most_entropy(vocabulary_size: int | None) -> float:
    """Nats of a distribution over a vocabulary, all tokens alike; where its size is not known of the largest one."""
    return math.log(vocabulary_size or LARGEST_VOCABULARY)


def are_no_samples(surprisal: Floats, vocabulary_size: int | None) -> bool:
    """Whether sampled tokens are less likely than the most even distribution makes them, by `moments` of their -log p,
    whose mean is an entropy in expectation.
    """
    if surprisal[0] < _TOKENS_FOR_UNITS:
        return False
    mean, error = _mean_and_error(surprisal)
    return mean - _DIFFERS * error > most_entropy(vocabulary_size)


def _mean_and_error(sums: Floats) -> tuple[float, float]:
    count, total, squares = sums.tolist()
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean * mean) / count)


def _errors_from_0(sums: Floats) -> float:
    mean, error = _mean_and_error(sums)
    return abs(mean) / error if error > 0 else math.inf
