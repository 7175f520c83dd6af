"""One question, asked again and again: while the weights stay, so does its answer."""

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.engines.server.answers import Candidates, Question
from mismatch_probe.errors import EngineError

if TYPE_CHECKING:
    from mismatch_probe.engines.server.client import Client

_TOP: Final = 5
TIMES_ITS_NOISE: Final = 10.0
LEAST_MOVE: Final = 0.05
"""Nats by which an answer may move: so many times the server's own noise, and this in any case. Among other requests a
server in 16 bit rounds otherwise, and a likely token's log-prob moves by hundredths.
"""


class StandingQuestion:
    """Sees weights that change without a label; a small step of training changes less than it can see."""

    def __init__(self, client: "Client", prompt: list[int], own_noise: float) -> None:
        """own_noise: nats by which the server's log-probs move of themselves."""
        self._client = client
        self._question = Question(prompt, 1, seed=0, ignore_eos=True, top=_TOP)
        self._bearable = max(LEAST_MOVE, TIMES_ITS_NOISE * own_noise)
        self._answer = self._ask()

    @property
    def answer(self) -> dict[str, float]:
        """Log-probs (nats) of the likeliest tokens by their ids, as JSON has them."""
        return {str(token_id): value for token_id, value in self._answer.items()}

    def renew(self) -> None:
        """The server was sent other weights: its answer is another from now on."""
        self._answer = self._ask()

    def check(self) -> None:
        """Ask again.

        Raises:
            EngineError: the answer is another than at the beginning, or cannot be had.
        """
        self._require("than when it was first asked", self._answer, self._ask())

    def require(self, recorded: Mapping[str, Any]) -> None:
        """
        Raises:
            EngineError: an earlier process was answered otherwise.
        """
        before = {int(token_id): float(value) for token_id, value in recorded.items()}
        self._require("than the run was begun with", before, self._answer)

    def _require(self, when: str, before: Candidates, now: Candidates) -> None:
        change = other_answer(before, now, self._bearable)
        if change is not None:
            raise EngineError(
                f"the server at {self._client.url} answers the same question otherwise {when} ({change}): it holds "
                f"other weights now, and its responses would be of two policies; {self._client.weights.advice}"
            )

    def _ask(self) -> Candidates:
        """What is given, of what is asked for."""
        given = self._client.ask(self._question).candidates[0]
        return {token_id: value for token_id, value in given.items() if isfinite(value)}


def other_answer(before: Candidates, now: Candidates, bearable: float) -> str | None:
    """How `now` departs from `before` by more than `bearable` nats; None where it does not, or one of them is empty."""
    if not before or not now:
        return None
    moved = max((abs(before[token_id] - now[token_id]) for token_id in before.keys() & now.keys()), default=None)
    if moved is None:
        return "with other tokens"
    return None if moved <= bearable else f"by {moved:.2g} nats, where its own noise allows {bearable:.2g}"
