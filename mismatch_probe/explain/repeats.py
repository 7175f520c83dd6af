"""Does a side agree with itself? The same token after the same context, met in several responses of the log."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.tokens import LoggedTokens

_LEAST_DEGREES: Final = 2
ROUNDING_FLOORS: Final = 2.0
"""Two values of an engine differ by less: it rounds otherwise in another batch."""
_SHARE_OF_RESIDUAL: Final = 0.5
WRONG_AT_MOST: Final = 1e-3
_LESS_BY_CHANCE: Final = 0.01


@dataclass(frozen=True)
class Repeats:
    """Of tokens that occur several times after the same context, under the same weights.

    degrees: of freedom, how many more they are than their contexts. spread_floors: root mean square by which their
    log-probs differ from each other's mean, in units of rounding; residual_floors: by which they differ from what is
    declared.
    """

    num_tokens: int
    degrees: int
    spread_floors: float
    residual_floors: float

    @property
    def disagree(self) -> bool:
        """Whether they surely differ from each other by more than rounding, and may by as much as from the checkpoint:
        the one by a chi-squared test of their variance, the other by an F test of it.
        """
        if self.degrees < _LEAST_DEGREES:
            return False
        of_rounding = self.degrees * (self.spread_floors / ROUNDING_FLOORS) ** 2
        return bool(special.chdtrc(self.degrees, of_rounding) <= WRONG_AT_MOST) and not self.agree

    @property
    def agree(self) -> bool:
        """Whether they surely differ less from each other than from the checkpoint."""
        if self.degrees < _LEAST_DEGREES:
            return False
        of_residual = (self.spread_floors / max(_SHARE_OF_RESIDUAL * self.residual_floors, ROUNDING_FLOORS)) ** 2
        return bool(special.fdtr(self.degrees, self.num_tokens, of_residual) <= _LESS_BY_CHANCE)


def repeats(tokens: LoggedTokens, judge: Judge, null: Account) -> Repeats:
    """Spread within each context's repetitions."""
    places: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, (sequence, response) in enumerate(zip(tokens.sequences, tokens.responses, strict=True)):
        version = (response.weight_version, response.step)
        first = int(tokens.starts[row])
        context = hash(tuple(sequence.prompt_token_ids))
        for place, token in enumerate(sequence.token_ids):
            context = hash((context, token))
            if judge.counted[first + place]:
                places[version, context, place].append(first + place)
    squares, residuals = [], []
    for same in places.values():
        if len(same) > 1:
            values = (judge.column[same] - null.predicted[same]) / null.unit[same]
            squares.append((values - values.mean()) ** 2 * len(same) / (len(same) - 1))
            residuals.append(values**2)
    if not squares:
        return Repeats(0, 0, 0.0, 0.0)
    flat = np.concatenate(squares)
    return Repeats(
        num_tokens=len(flat),
        degrees=len(flat) - len(squares),
        spread_floors=float(np.sqrt(flat.mean())),
        residual_floors=float(np.sqrt(np.concatenate(residuals).mean())),
    )
