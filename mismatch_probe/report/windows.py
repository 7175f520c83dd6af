"""Which stretches of which responses a page shows token by token, within a budget of bytes."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.records.summary import PairSummary, ResponseTokens, Summary, TokenInContext

_MOST_TOKENS: Final = 2400
_FEWEST_A_PAIR: Final = 64
_LONGEST: Final = 256
"""Tokens of a page, of a pair at least, and of a response at most."""


@dataclass(frozen=True)
class Window:
    """The recorded tokens of a response from `start` up to `end`."""

    response: ResponseTokens
    start: int
    end: int

    @property
    def places(self) -> range:
        return range(self.start, self.end)

    @property
    def diffs(self) -> list[float | None]:
        """d of the tokens, nats; None where one was not sampled."""
        return _diffs(self.response)[self.start : self.end]

    def holds(self, token: TokenInContext) -> bool:
        return token.sequence_id == self.response.sequence_id and token.position - self.response.first in self.places


def windows(summary: Summary, pair: PairSummary) -> list[Window]:
    """Of one pair, as far as the page's budget reaches: at least one where a response was recorded."""
    sharing = sum(bool(each.worst_responses) for each in summary.pairs)
    budget = max(_FEWEST_A_PAIR, _MOST_TOKENS // max(1, sharing))
    length = min(budget, _LONGEST)
    shown: list[Window] = []
    for response in pair.worst_responses:
        window = _around_the_worst(response, length)
        if len(window.places) > budget:
            break
        shown.append(window)
        budget -= len(window.places)
    return shown


def _around_the_worst(response: ResponseTokens, length: int) -> Window:
    diffs = _diffs(response)
    worst = max(range(len(diffs)), key=lambda place: abs(diffs[place] or 0))
    start = max(0, min(worst - length // 2, len(diffs) - length))
    return Window(response, start, min(start + length, len(diffs)))


def _diffs(response: ResponseTokens) -> list[float | None]:
    return [
        None if pi is None or mu is None else pi - mu for pi, mu in zip(response.log_pi, response.log_mu, strict=True)
    ]
