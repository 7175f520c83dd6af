"""Pairs whose deviations are known, from a seed."""

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.sequences import Sequences, TokenPair

Vector = npt.NDArray[np.float64]


def pair_with(diff: Vector, lengths: npt.ArrayLike, clusters: npt.ArrayLike | None = None, **legs: object) -> TokenPair:
    """A pair whose d is `diff` (up to the last bit); mu's log-probs spread over 3 nats."""
    log_mu = -max(diff.max(), 1.0) - 3 * np.random.default_rng(1).random(diff.size)
    return TokenPair(Sequences.of_lengths(lengths, clusters), log_mu + diff, log_mu, **legs)  # type: ignore[arg-type]


def gaussian_pair(num_sequences: int, length: int, sigma: float, seed: int = 0) -> TokenPair:
    """d ~ N(-sigma^2 / 2, sigma^2), so that e^d has mean 1: KL = sigma^2 / 2 and ESS = exp(-sigma^2) exactly."""
    diff = np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, num_sequences * length)
    return pair_with(diff, np.full(num_sequences, length))


def clustered_pair(num_sequences: int, seed: int, tail: float = 5.0, spread: float = 0.3) -> TokenPair:
    """Sequences of many lengths whose tokens are heavy-tailed (Student's t) at a scale that differs by sequence."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(5, 0.5, num_sequences), 10, 2000).astype(np.int64)
    scale = 0.01 * np.exp(random.normal(0, spread, num_sequences))
    return pair_with(np.repeat(scale, lengths) * random.standard_t(tail, lengths.sum()), lengths)
