"""Responses whose log-probs have nothing to do with their tokens, among others that are as declared."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.tokens import LoggedTokens

_OFF_FLOORS: Final = 4.0
_AGREES_FLOORS: Final = 2.0
_LEAST_AGREEING: Final = 0.25
_MOST_CORRELATION: Final = 0.25
_LEAST_TOKENS: Final = 8
_LEAST_OFF: Final = 2


@dataclass(frozen=True)
class Unrelated:
    """How many of the responses, and the correlation of their log-probs with what their tokens should have."""

    num_off: int
    num_responses: int
    correlation: float


def unrelated(tokens: LoggedTokens, judge: Judge, null: Account) -> Unrelated | None:
    """None where responses are off by degrees, where hardly any agrees, or where log-probs do follow the tokens."""
    units = np.abs(judge.residual(null)) / null.unit
    off, agreeing = [], 0
    for row in range(tokens.num_responses):
        ours = units[tokens.of_row(row)]
        known = ours[np.isfinite(ours)]
        if len(known) < _LEAST_TOKENS:
            continue
        typical = float(np.median(known))
        if typical > _OFF_FLOORS:
            off.append(row)
        elif typical <= _AGREES_FLOORS:
            agreeing += 1
        else:
            return None
    if len(off) < _LEAST_OFF or agreeing < _LEAST_AGREEING * (agreeing + len(off)):
        return None
    chosen = np.isin(tokens.rows, off) & np.isfinite(units)
    correlation = float(np.corrcoef(judge.column[chosen], null.predicted[chosen])[0, 1])
    if not abs(correlation) <= _MOST_CORRELATION:
        return None
    return Unrelated(len(off), tokens.num_responses, correlation)
