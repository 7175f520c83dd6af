"""Log-probs that are none: absent, a floor that an engine writes, or 0 where no distribution gives certainty."""

from typing import Final

import numpy as np

from mismatch_probe.explain.tokens import Bools, Floats

FLOOR_NATS: Final = -1000.0
"""vLLM writes -9999; no token that was sampled has less than this."""
_UNLIKELY_NATS: Final = -1.0
_LEAST_SHARE: Final = 0.5


def missing(column: Floats, predicted: Floats, counted: Bools) -> Bools:
    """Which log-probs are missing [T].

    A log-prob of exactly 0 is one where the token is certain. Where zeros stand at unlikely tokens about as often as
    those occur, they stand for nothing that was computed.
    """
    absent = ~np.isfinite(column) | (column <= FLOOR_NATS)
    zeros = counted & (column == 0)
    unlikely = predicted < _UNLIKELY_NATS
    if zeros.any() and (counted & unlikely).any():
        as_often = np.mean(unlikely[zeros]) >= _LEAST_SHARE * np.mean(unlikely[counted])
        if as_often:
            absent |= zeros
    return np.asarray(counted & absent)
