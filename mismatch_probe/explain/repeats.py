"""Does a side agree with itself? The same token after the same context, met in several responses of the log."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from mismatch_probe.explain.judging import Account, Judge
from mismatch_probe.explain.tokens import LoggedTokens


@dataclass(frozen=True)
class Repeats:
    """Of tokens that occur several times after the same context, under the same weights.

    spread_floors: root mean square by which their log-probs differ from each other's mean, in units of rounding;
    residual_floors: by which they differ from what is declared.
    """

    num_tokens: int
    spread_floors: float
    residual_floors: float


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
        return Repeats(0, 0.0, 0.0)
    flat = np.concatenate(squares)
    return Repeats(len(flat), float(np.sqrt(flat.mean())), float(np.sqrt(np.concatenate(residuals).mean())))
