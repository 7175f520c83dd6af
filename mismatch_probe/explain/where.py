"""Where a side departs that nothing explains: in which responses, and where along them."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.tokens import LoggedTokens
from mismatch_probe.notation import write_number
from mismatch_probe.stats.rounding_floor import trimmed_mean

_FIRST: Final = 8
_OFF_FLOORS: Final = 2.0
_UNEVEN: Final = 2.0
_LEAST_TOKENS: Final = 30


def where(tokens: LoggedTokens, judge: Judge, null: Account) -> Iterator[str]:
    """Sentences for what is uneven; none for a departure that is everywhere alike."""
    units = np.abs(judge.residual(null)) / null.unit
    known = np.isfinite(units)
    rows = np.unique(tokens.rows[known])
    off = [row for row in rows if np.median(units[known & (tokens.rows == row)]) > _OFF_FLOORS]
    if 0 < len(off) < len(rows):
        yield f"{len(off)} of {len(rows)} responses depart by more than {_OFF_FLOORS:g} floors on half of their tokens"
    first, later = (units[known & (tokens.places < _FIRST)], units[known & (tokens.places >= _FIRST)])
    if min(len(first), len(later)) < _LEAST_TOKENS:
        return
    early, late = (float(np.sqrt(trimmed_mean(part**2))) for part in (first, later))
    sizes = f"{write_number(early)} floors on the first {_FIRST} tokens, {write_number(late)} on the others"
    if early > _UNEVEN * late:
        yield f"{sizes}: it looks like other text before the response"
    elif late > _UNEVEN * early:
        yield f"{sizes}: it grows along the response, as other positions do"
