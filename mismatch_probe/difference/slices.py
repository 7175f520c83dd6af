"""A part of a sample: a range of positions, responses of some lengths, log-ratios held within a bound."""

from dataclasses import replace

import numpy as np

from mismatch_probe.stats.sequences import Array, Mask, Sequences, TokenPair, difference

Span = tuple[int, int | None]
"""From the first number up to, not including, the second; None is open."""

EVERYTHING: Span = (0, None)


def part_of(
    pair: TokenPair,
    *,
    position: Span = EVERYTHING,
    length: Span = EVERYTHING,
    step: Span = EVERYTHING,
    clip: float | None = None,
) -> TokenPair | None:
    """The tokens at some positions (from 0) of responses of some lengths and steps; None where there is none.

    clip: d is held within +-clip nats.
    """
    kept: TokenPair | None = pair
    if (position, length, step) != (EVERYTHING,) * 3:
        kept = pair.of_tokens(tokens_of(pair.sequences, position, length, step))
    if kept is None or clip is None:
        return kept
    held = np.clip(difference(kept.log_pi, kept.log_mu), -clip, clip)
    return replace(kept, log_pi=kept.log_mu + held, clip=clip)


def tokens_of(sequences: Sequences, position: Span, length: Span, step: Span) -> Mask:
    """Which tokens [T] lie at these positions of responses of these lengths and steps."""
    chosen = _within(sequences.positions, position) & sequences.spread(_within(sequences.lengths, length))
    if step == EVERYTHING:
        return chosen
    if sequences.steps is None:
        return np.zeros_like(chosen)
    return chosen & sequences.spread(_within(sequences.steps, step))


def _within(values: Array, span: Span) -> Mask:
    low, high = span
    return np.asarray((values >= low) & (True if high is None else values < high))
