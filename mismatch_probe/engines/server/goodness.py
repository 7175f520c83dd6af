"""Whether tokens were drawn from the log-probs that came with them."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.special import chdtrc

from mismatch_probe.engines.server.answers import Answer

_LEAST_EXPECTED: Final = 5.0
"""Draws in a group, below which the chi-square distribution does not hold."""


def sampled_as_said(answers: Sequence[Answer]) -> float | None:
    """The p-value (chi-square) of the first tokens of `answers`, independent draws behind one prompt, under the
    candidates' log-probs, all other tokens in one group; None where too few groups are likely enough.
    """
    said: dict[int, float] = {}
    for answer in answers:
        said |= answer.candidates[0] if answer.candidates else {}
    drawn = Counter(answer.token_ids[0] for answer in answers if answer.token_ids)
    most_likely = sorted(said, key=lambda token_id: said[token_id], reverse=True)
    listed = {token_id for answer in answers for token_id in (answer.candidates[0] if answer.candidates else {})}
    draws = sum(drawn.values())
    kept = [
        token_id for token_id in most_likely if token_id in listed and draws * np.exp(said[token_id]) >= _LEAST_EXPECTED
    ]
    expected = [draws * float(np.exp(said[token_id])) for token_id in kept]
    observed = [drawn[token_id] for token_id in kept]
    rest = draws - sum(expected)
    if rest >= _LEAST_EXPECTED:
        expected, observed = [*expected, rest], [*observed, draws - sum(observed)]
    if len(expected) < 2:
        return None
    scale = sum(observed) / sum(expected)
    due = scale * np.array(expected)
    return float(chdtrc(len(expected) - 1, np.sum((np.array(observed) - due) ** 2 / due)))
