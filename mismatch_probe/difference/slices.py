"""A part of a sample: a range of positions, responses of some lengths, log-ratios held within a bound."""

from dataclasses import replace

import numpy as np

from mismatch_probe.stats.sequences import Array, Mask, Sequences, TokenPair, difference

Span = tuple[int, int | None]
"""From the first number up to, not including, the second; None is open."""

EVERYTHING: Span = (0, None)


def part_of(
    pair: TokenPair, *, position: Span = EVERYTHING, length: Span = EVERYTHING, clip: float | None = None
) -> TokenPair | None:
    """The tokens at some positions (from 0) of responses of some lengths; None where there is none.

    clip: d is held within +-clip nats. Keeps what metrics are made of and drops the reference legs.
    """
    sequences = pair.sequences
    chosen = _within(sequences.positions, position) & sequences.spread(_within(sequences.lengths, length))
    lengths = sequences.sum_by_sequence(chosen).astype(np.int64)
    if not lengths.any():
        return None
    kept = TokenPair(
        Sequences.of_lengths(lengths[lengths > 0], sequences.clusters[lengths > 0]),
        log_pi=pair.log_pi[chosen],
        log_mu=pair.log_mu[chosen],
        top1_pi=None if pair.top1_pi is None else pair.top1_pi[chosen],
        top1_mu=None if pair.top1_mu is None else pair.top1_mu[chosen],
        entropy_pi=None if pair.entropy_pi is None else pair.entropy_pi[chosen],
    )
    if clip is None:
        return kept
    held = np.clip(difference(kept.log_pi, kept.log_mu), -clip, clip)
    return replace(kept, log_pi=kept.log_mu + held)


def _within(values: Array, span: Span) -> Mask:
    low, high = span
    return np.asarray((values >= low) & (True if high is None else values < high))
